"""Writes rope.json and golden_extra/ by running Hugging Face transformers on tiny random Qwen3-Next models.

    python make_reference.py OUTPUT_FOLDER

Needs torch, transformers and safetensors; the package under test is not imported.
"""

import json
import math
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from hf_run import differences, greedy, load, losses_and_gradients, norms, prefill, record, states  # isort: skip
from make_rope import rope_entries  # isort: skip

MIN_GAP = 1e-3  # of router logits at the top-k border and of greedy logits: neither may hang on float noise
MAX_NOISE = 3e-5  # largest logit difference between transformers' own code paths
STEPS = 8
FULL, LINEAR = "full_attention", "linear_attention"
BASE = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 28, "shared_expert_intermediate_size": 12,
    "num_attention_heads": 4, "linear_num_key_heads": 2, "max_position_embeddings": 128, "router_aux_loss_coef": 0.05,
    "num_experts_per_tok": 2,
}  # fmt: skip
CASES = {
    "y_bias_yarn": {
        "batch": 2, "length": 48, "seed": 100, "ignored_labels": 9,
        "config": {
            "num_hidden_layers": 4, "full_attention_interval": 2, "attention_bias": True, "norm_topk_prob": False,
            "moe_intermediate_size": 8, "num_experts": 4, "num_key_value_heads": 2, "head_dim": 20,
            "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 100.0, "partial_rotary_factor": 0.4, "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    },
    "z_odd_order": {
        "batch": 1, "length": 72, "seed": 200, "v4_config": True,
        "config": {
            "num_hidden_layers": 5, "layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR], "mlp_only_layers": [0],
            "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 3,
            "num_key_value_heads": 1, "head_dim": 32, "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    },
    "w_longrope_dynamic": {
        "batch": 1, "length": 80, "seed": 300, "generate": False,
        "config": {
            "num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "max_position_embeddings": 64,
            "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 2,
            "head_dim": 32, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
            "rope_parameters": {
                "rope_type": "dynamic", "rope_theta": 100.0, "partial_rotary_factor": 0.25, "factor": 4.0,
            },
        },
    },
}  # fmt: skip


def randomise(model, rng):
    """Every parameter random; about half of the linear heads decay slowly, so that old tokens still count."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=rng)
        if name.endswith("A_log"):
            fast = torch.log(0.3 + 1.7 * torch.rand(parameter.shape, generator=rng))
            value = torch.where(torch.arange(len(noise)) % 2 == 0, math.log(0.05) + 0.2 * noise, fast)
        elif name.endswith("linear_attn.norm.weight"):
            value = 1 + 0.3 * noise
        elif noise.ndim == 1:  # zero-centred norms, biases, dt_bias
            value = (0.7 if name.endswith("dt_bias") else 0.3) * noise
        elif name.endswith(("embed_tokens.weight", "conv1d.weight", "lm_head.weight")):
            value = (1.0 if "embed" in name else 0.5) * noise
        else:  # [..., out, in]; more on the way out of the mixers, so that they weigh against the residual
            scale = 1.5 if name.endswith(("out_proj.weight", "o_proj.weight")) else 1.0
            value = scale * noise / noise.shape[-1] ** 0.5
        parameter.data.copy_(value)


def attempt(folder, name, case, seed):
    """Writes the case with this seed; False if there is a near tie, much float noise, or logits off scale."""
    rng = torch.Generator().manual_seed(seed)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**{**BASE, **case["config"]}))
    randomise(model, rng)
    model.save_pretrained(folder)
    model = load(folder)
    ids = torch.randint(0, model.config.vocab_size, (case["batch"], case["length"]), generator=rng)
    labels = ids.clone()
    labels.view(-1)[torch.randperm(labels.numel(), generator=rng)[: case.get("ignored_labels", 0)]] = -100

    seen, gaps = {}, []
    record(model, seen, gaps)
    with torch.no_grad():
        logits = model(ids).logits
        tensors = {**seen, "input_ids": ids, "labels": labels, "logits": logits}
        tensors |= states(prefill(model, ids)[1])
        if case.get("generate", True):
            tensors["gen.tokens"], tensors["gen.step_logits"] = greedy(model, ids, STEPS)
            for n in (1, 2):  # prompts shorter than the conv kernel
                tensors[f"gen_short{n}.prompt"] = prompt = ids[:1, :n]
                tensors[f"gen_short{n}.tokens"], tensors[f"gen_short{n}.step_logits"] = greedy(model, prompt, STEPS)
    tensors |= {k: v.view(*ids.shape, -1) for k, v in tensors.items() if k.startswith("router_logits")}
    best = [v.topk(2).values for k, v in tensors.items() if k.endswith("step_logits")]
    margin = min([(pair[..., 0] - pair[..., 1]).min().item() for pair in best], default=math.inf)
    if min(*gaps, margin) < MIN_GAP or not 1.7 < logits.std() < 2.5:
        return False

    gradients, aux = losses_and_gradients(model, ids, labels)
    tensors |= {"loss_ce": gradients["ce"][0], "aux_loss": aux, "loss_total": gradients["total"][0]}
    tensors |= {f"grad_ce.{k}": g for k, g in gradients["ce"][1].items() if g.numel() <= 128}
    noise = differences(model, ids, tensors, gradients["ce"][1], labels)
    diffs = [value for key, value in noise.items() if key.endswith("logit_diff")]
    if max([noise["chunked_vs_recurrent"]["logits_max_abs"], *diffs]) > MAX_NOISE:
        return False
    meta = {
        "case": name, "seed": seed, "seeds_tried": seed - case["seed"] + 1,
        "batch": case["batch"], "seq_len": case["length"],
        "torch": torch.__version__, "transformers": transformers.__version__,
        **noise,
        "min_router_logit_gap_at_topk": min(gaps), "min_greedy_margin": None if margin == math.inf else margin,
        "logits_std": logits.std().item(), "logits_abs_max": logits.abs().max().item(),
        "loss_ce": tensors["loss_ce"].item(), "aux_loss": aux.item(), "loss_total": tensors["loss_total"].item(),
    }  # fmt: skip
    grad_norms = {kind: norms(gradients[kind][1]) for kind in gradients}
    grad_norms |= {f"{kind}_global": math.hypot(*grad_norms[kind].values()) for kind in gradients}
    assert min(grad_norms["ce"].values()) > 0 and min(grad_norms["total"].values()) > 0

    tensors = {k: v.int() if v.dtype == torch.int64 else v.reshape(v.shape or 1) for k, v in tensors.items()}
    tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(tensors, folder / "golden.safetensors", metadata={k: meta[k] for k in ("case", "torch", "transformers")})
    (folder / "grad_norms.json").write_text(json.dumps(grad_norms, indent=1))
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    if case.get("v4_config"):
        write_v4_config(folder, ids, logits)
    return True


def write_v4_config(folder, ids, logits):
    """The same config as transformers 4 spelled it: RoPE at the top level, torch_dtype."""
    new = json.loads((folder / "config.json").read_text())
    rope = new["rope_parameters"]
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "dtype")} | {"torch_dtype": new["dtype"]}
    old |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor")} | {"rope_scaling": rope}
    old["transformers_version"] = "4.57.0"
    (folder / "config_v4.json").write_text(json.dumps(old, indent=2, sort_keys=True) + "\n")

    read = [Qwen3NextConfig.from_json_file(folder / file) for file in ("config.json", "config_v4.json")]
    first, second = ({**c.to_dict(), "transformers_version": None} for c in read)
    assert first == second, {k: (first.get(k), second.get(k)) for k in first | second if first.get(k) != second.get(k)}
    assert torch.equal(load(folder, config=read[1])(ids).logits, logits)


def main(out):
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    entries = ",\n".join(json.dumps(entry) for entry in rope_entries())
    (out / "rope.json").write_text(f"[\n{entries}\n]\n")
    for name, case in CASES.items():
        folder = out / "golden_extra" / name
        seed = case["seed"]
        while not attempt(folder, name, case, seed):
            seed += 1
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(name, "seed", seed, f"{size / 1e3:.0f} kB", (folder / "meta.json").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
