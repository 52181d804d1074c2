"""Writes golden_adapter/: adapters that PEFT made on one of the golden models, and what the adapted model computes.

    python make_adapter.py golden/b_remainder_6l golden_adapter

Needs torch, transformers, peft and safetensors; the package under test is not imported.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextForCausalLM

# Ranks and scales that differ by name; the experts' rank is neither their number nor a width. Targets that end in
# gate_proj, up_proj or down_proj must be parameters: as modules PEFT takes them for the experts' of transformers 4.
SETTINGS = {
    "r": 4, "lora_alpha": 6,
    "target_modules": [
        "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "embed_tokens", "lm_head",
        "shared_expert_gate",
    ],
    "target_parameters": [
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight", "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight", "mlp.shared_expert.down_proj.weight",
    ],
    "rank_pattern": {
        "in_proj_qkvz": 3, "mlp.experts.gate_up_proj": 5, "mlp.experts.down_proj": 2,
        "mlp.shared_expert.up_proj.weight": 1,
    },
    "alpha_pattern": {"o_proj": 10, "mlp.experts.down_proj": 3},
}  # fmt: skip


def main(source: str, target: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    base = Qwen3NextForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ids = load_file(Path(source) / "golden.safetensors")["input_ids"].long()
    plain = base(ids, use_cache=False).logits
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **SETTINGS)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    folder = Path(target)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a model card
    values = json.loads((folder / "adapter_config.json").read_text())
    values["base_model_name_or_path"] = ""
    (folder / "adapter_config.json").write_text(json.dumps(values, indent=1) + "\n")
    save_file({"input_ids": ids.int(), "logits": logits.contiguous()}, folder / "golden.safetensors")
    print(f"logits move by {(logits - plain).abs().max():.3f} of {plain.abs().max():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
