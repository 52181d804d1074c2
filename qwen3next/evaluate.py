"""Held-out text: bits per byte of a model, and of the compressors that everyone has."""

import gzip
import lzma
import math
from collections.abc import Iterable
from functools import partial
from itertools import islice

import jax

from qwen3next.config import IGNORED_LABEL, Compute
from qwen3next.data.batches import Batch as HostBatch
from qwen3next.mesh import place
from qwen3next.model import Qwen3Next
from qwen3next.programs import COMPILER_OPTIONS
from qwen3next.training import Batch
from qwen3next.vocabulary import Losses


@partial(jax.jit, static_argnames="compute", compiler_options=COMPILER_OPTIONS)
def _batch_loss(model: Qwen3Next, batch: Batch, compute: Compute) -> Losses:
    states = model.hidden(batch["input_ids"], batch["segment_ids"], compute=compute).states
    return model.cross_entropy(states, batch["labels"])


def evaluate(
    model: Qwen3Next, batches: Iterable[HostBatch], limit: int | None, compute: Compute, bytes_per_label: float | None
) -> dict[str, float]:
    """`loss`, nats a token, and `bits_per_byte`, over the first `limit` batches that hold a label, or all of them.

    Ends of text are predicted too and count as bits. `bytes_per_label` is that of the whole held-out text: over all
    batches the bytes are exactly the text's. If it is `None` there are no bits per byte.
    """
    nats, count = 0.0, 0.0
    labelled = (batch for batch in batches if (batch["labels"] != IGNORED_LABEL).any())
    for batch in islice(labelled, limit):
        losses = _batch_loss(model, place(batch), compute)
        nats, count = nats + float(losses.nats), count + float(losses.labels)
    result = {"loss": nats / count}
    if bytes_per_label is not None:
        result["bits_per_byte"] = nats / math.log(2) / (bytes_per_label * count)
    return result


def compressed_bits_per_byte(text: bytes) -> dict[str, float]:
    """What `gzip -9` and `xz` (its default, -6) need for the same bytes."""
    sizes = {"gzip": len(gzip.compress(text, 9)), "xz": len(lzma.compress(text, preset=6))}
    return {name: 8 * size / len(text) for name, size in sizes.items()}
