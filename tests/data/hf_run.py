"""Measuring a transformers model: activations, states, greedy tokens, losses, gradients; see make_reference.py."""

import torch
from transformers import DynamicCache, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as modeling


def load(folder, **kwargs):
    kwargs = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager", **kwargs}
    return Qwen3NextForCausalLM.from_pretrained(folder, **kwargs).eval()


def record(model, seen, gaps):
    """Hooks that keep the latest output of each layer, mixer, mlp and router, and every top-k gap of the routers."""

    def keep(key):
        def hook(module, inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            seen[key] = output.detach()
            if key.startswith("router_logits"):
                top = output.detach().sort(descending=True).values
                gaps.append((top[:, module.top_k - 1] - top[:, module.top_k]).min().item())

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layer_out.{i}"))
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        mixer.register_forward_hook(keep(f"mixer_out.{i}"))
        layer.mlp.register_forward_hook(keep(f"mlp_out.{i}"))
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(keep(f"router_logits.{i}"))
    model.model.norm.register_forward_hook(keep("final_hidden"))


def states(cache):
    found = {}
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "recurrent_states", None) is not None:
            found |= {f"state.{i}.recurrent": layer.recurrent_states[0], f"state.{i}.conv": layer.conv_states[0]}
        else:
            found |= {f"state.{i}.key": layer.keys, f"state.{i}.value": layer.values}
    return {key: value.clone() for key, value in found.items()}


def prefill(model, *pieces):
    cache = DynamicCache(config=model.config)
    logits = [model(piece, cache=cache, use_cache=True).logits for piece in pieces]
    return torch.cat(logits, 1), cache


def greedy(model, prompt, steps):
    logits, cache = prefill(model, prompt)
    tokens, step_logits = [], []
    for _ in range(steps):
        step_logits.append(logits[:, -1])
        tokens.append(step_logits[-1].argmax(-1))
        logits = model(tokens[-1][:, None], cache=cache, use_cache=True).logits
    return torch.stack(tokens, 1), torch.stack(step_logits, 1)


def losses_and_gradients(model, ids, labels):
    """{'ce' | 'total': (loss, {checkpoint key: gradient})} and the load-balancing loss."""
    result = {}
    for kind in ("ce", "total"):
        model.zero_grad()
        out = model(ids, labels=labels, output_router_logits=kind == "total")
        out.loss.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            head, fused, tail = name.partition(".mlp.experts.")
            if not fused:
                gradients[name] = parameter.grad.clone()
                continue
            for e, gradient in enumerate(parameter.grad.clone()):  # fused in memory, one key per expert on disk
                names = ["gate_proj", "up_proj"] if tail == "gate_up_proj" else ["down_proj"]
                for part, part_name in zip(gradient.chunk(len(names)), names, strict=True):
                    gradients[f"{head}{fused}{e}.{part_name}.weight"] = part
        result[kind] = (out.loss.detach(), gradients)
    return result, out.aux_loss.detach()


def norms(gradients):
    return {key: gradient.norm().item() for key, gradient in gradients.items()}


def largest(difference):
    return difference.abs().max().item()


def differences(model, ids, tensors, ce_gradients, labels):
    """How far transformers is from itself: chunked or token by token, in pieces, cached decode or recomputed."""
    chunked = modeling.torch_chunk_gated_delta_rule
    modeling.torch_chunk_gated_delta_rule = modeling.torch_recurrent_gated_delta_rule
    try:
        serial = model(ids, output_hidden_states=True)
        serial_gradients = losses_and_gradients(model, ids, labels)[0]["ce"][1]
    finally:
        modeling.torch_chunk_gated_delta_rule = chunked
    serial_norms = norms(serial_gradients)
    found = {
        "chunked_vs_recurrent": {
            "logits_max_abs": largest(serial.logits - tensors["logits"]),
            "final_hidden_max_abs": largest(serial.hidden_states[-1] - tensors["final_hidden"]),
            "grad_norm_max_rel": max(abs(serial_norms[k] - n) / max(n, 1e-3) for k, n in norms(ce_gradients).items()),
            "grad_max_abs": max(largest(serial_gradients[k] - g) for k, g in ce_gradients.items()),
        }
    }
    if "gen.tokens" in tensors:
        with torch.no_grad():
            whole = model(torch.cat([ids, tensors["gen.tokens"][:, :-1]], 1)).logits[:, ids.shape[1] - 1 :]
            pieces, cache = prefill(model, ids[:, :5], ids[:, 5:6], ids[:, 6:])
            old = model(tensors["gen.tokens"][:, :1], cache=cache, use_cache=True).logits
            _, cache = prefill(model, ids)
            for layer in cache.layers:
                for state in (getattr(layer, "recurrent_states", None) or {}).values():
                    state.zero_()
            forgetful = model(tensors["gen.tokens"][:, :1], cache=cache, use_cache=True).logits
        found["cached_decode_vs_full_recompute_max_abs_logit_diff"] = largest(whole - tensors["gen.step_logits"])
        found["prefill_in_3_pieces_vs_one_max_abs_logit_diff"] = largest(pieces - tensors["logits"])
        found["next_logits_max_abs_change_if_recurrent_states_are_zeroed"] = largest(old - forgetful)
        found["distinct_generated_tokens"] = [len(set(row.tolist())) for row in tensors["gen.tokens"]]
    return found
