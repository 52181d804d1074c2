"""RoPE frequencies of transformers' own Qwen3NextRotaryEmbedding for many rope_parameters; see make_reference.py."""

import copy

import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

# (head_dim, max_position_embeddings, what every rope_parameters dict of this size has)
BIG = (256, 131072, {"rope_theta": 1e7, "partial_rotary_factor": 0.25})
SMALL = (32, 128, {"rope_theta": 1e4, "partial_rotary_factor": 0.25})
STEEP = (32, 128, {"rope_theta": 10.0, "partial_rotary_factor": 0.25})
WHOLE = (32, 128, {"rope_theta": 500.0, "partial_rotary_factor": 1.0})
ODD = (12, 128, {"rope_theta": 1e4, "partial_rotary_factor": 0.25})  # int(12 * 0.25) = 3 dims
SIZES = {"big": BIG, "small": SMALL, "steep": STEEP, "whole": WHOLE, "odd": ODD}

YARN_BIG = {"factor": 4.0, "original_max_position_embeddings": 32768}
YARN_SMALL = {"factor": 4.0, "original_max_position_embeddings": 32}
YARN_EQUAL = {**YARN_SMALL, "beta_fast": 2.0, "beta_slow": 2.0}
LONG_BIG = {
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.03 * i**2 for i in range(32)],
    "original_max_position_embeddings": 8192,
}
LONG_SMALL = {
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 4.5, 8.5],
    "original_max_position_embeddings": 32,
}
LONG_ODD = {"short_factor": [1.0, 1.2], "long_factor": [2.0, 5.0], "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# rope_type, size, remark, extra parameters, sequence lengths
ROPES = [
    ("default", "big", "", {}, [4096]),
    ("default", "small", "", {}, [48]),
    ("default", "whole", "", {}, [48]),
    ("default", "odd", "", {}, [48]),
    ("linear", "big", "", {"factor": 4.0}, [4096]),
    ("linear", "small", "", {"factor": 2.5}, [48]),
    ("linear", "odd", "", {"factor": 3.0}, [48]),
    ("dynamic", "big", "", {"factor": 4.0}, [1000, 131072, 131073, 524288]),
    ("dynamic", "small", "", {"factor": 2.0}, [127, 128, 129, 400]),
    ("dynamic", "small", "factor1", {"factor": 1.0}, [400]),
    ("dynamic", "odd", "", {"factor": 2.0}, [100, 200]),
    ("yarn", "big", "", YARN_BIG, [4096]),
    ("yarn", "big", "no_original", {"factor": 4.0}, [4096]),
    ("yarn", "big", "no_truncate", {**YARN_BIG, "truncate": False}, [4096]),
    ("yarn", "big", "attention_factor", {**YARN_BIG, "attention_factor": 0.75}, [4096]),
    ("yarn", "big", "mscale", {**YARN_BIG, "mscale": 0.707, "mscale_all_dim": 1.0}, [4096]),
    ("yarn", "big", "mscale_alone", {**YARN_BIG, "mscale": 0.707}, [4096]),
    ("yarn", "big", "betas", {**YARN_BIG, "beta_fast": 16.0, "beta_slow": 2.0}, [4096]),
    ("yarn", "big", "factor_null", {**YARN_BIG, "factor": None}, [4096]),
    ("yarn", "small", "", YARN_SMALL, [48]),
    ("yarn", "small", "no_truncate", {**YARN_SMALL, "truncate": False}, [48]),
    ("yarn", "steep", "", YARN_SMALL, [48]),
    ("yarn", "steep", "no_truncate", {**YARN_SMALL, "truncate": False}, [48]),
    ("yarn", "whole", "factor1", {"factor": 1.0, "original_max_position_embeddings": 128}, [48]),
    ("yarn", "whole", "", YARN_SMALL, [48]),
    ("yarn", "small", "low_is_high", {"factor": 4.0, "original_max_position_embeddings": 6}, [48]),
    ("yarn", "steep", "low_is_high_no_truncate", {**YARN_EQUAL, "truncate": False}, [48]),
    ("yarn", "steep", "high_below_zero", {"factor": 4.0, "original_max_position_embeddings": 2}, [48]),
    ("yarn", "steep", "low_above_dim", {"factor": 4.0, "original_max_position_embeddings": 1000000}, [48]),
    ("yarn", "odd", "", YARN_SMALL, [48]),
    ("longrope", "big", "", LONG_BIG, [100, 8192, 8193, 131072]),
    ("longrope", "big", "factor", {**LONG_BIG, "factor": 32.0}, [8193]),
    ("longrope", "big", "factor1", {**LONG_BIG, "factor": 1.0}, [8193]),
    ("longrope", "big", "attention_factor", {**LONG_BIG, "attention_factor": 1.25}, [8193]),
    ("longrope", "small", "", LONG_SMALL, [32, 33]),
    ("longrope", "odd", "", LONG_ODD, [32, 33]),
    ("llama3", "big", "", {**LLAMA3, "original_max_position_embeddings": 8192}, [4096]),
    ("llama3", "big", "no_original", LLAMA3, [4096]),
    ("llama3", "small", "", {**LLAMA3, "original_max_position_embeddings": 32}, [48]),
    ("llama3", "whole", "", {**LLAMA3, "high_freq_factor": 2.0, "original_max_position_embeddings": 64}, [48]),
    ("llama3", "odd", "", {**LLAMA3, "original_max_position_embeddings": 32}, [48]),
]


def rope_entries():
    for rope_type, size, remark, extra, lengths in ROPES:
        head_dim, max_position, common = SIZES[size]
        rope = {"rope_type": rope_type, **common, **extra}
        for length in lengths:
            config = Qwen3NextConfig(
                head_dim=head_dim, max_position_embeddings=max_position, rope_parameters=copy.deepcopy(rope)
            )
            rotary = Qwen3NextRotaryEmbedding(config)
            rotary(torch.zeros(1), torch.tensor([[length - 1]]))  # dynamic and longrope look at the largest position
            parts = [rope_type, size, remark, str(length) if len(lengths) > 1 else ""]
            yield {
                "name": "_".join(part for part in parts if part),
                "config": {"head_dim": head_dim, "max_position_embeddings": max_position, "rope_parameters": rope},
                "length": length,
                "inv_freq": rotary.inv_freq.tolist(),  # float32 read back exactly
                "attention_scaling": float(rotary.attention_scaling),
            }
