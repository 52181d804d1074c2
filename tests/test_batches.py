"""Batches: every row once an epoch, decided by the seed, the same whatever made them and wherever one goes on."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from folders import one_line

from qwen3next.config import IGNORED_LABEL, DataConfig
from qwen3next.data.batches import TrainBatches, eval_batches
from qwen3next.data.corpus import tokenize
from qwen3next.data.documents import Document, LeftOut, Part
from qwen3next.data.packing import Rows
from qwen3next.data.texts import read_texts
from qwen3next.errors import InputError
from qwen3next.tokenizer import ByteTokenizer

END = ByteTokenizer.end_of_text
ROOT = Path(__file__).parent.parent


def _corpus(*texts):
    documents = [Document(f"d{n}", (Part(bytes(text)),)) for n, text in enumerate(texts)]
    return tokenize(documents, ByteTokenizer(), 257, LeftOut("fail"))


def _rows(length, size=4):
    return Rows(_corpus(range(length)), size)


def _config(sequence_length=4, batch_size=3, **changes):
    return DataConfig(sequence_length=sequence_length, batch_size=batch_size, **changes)


def _batches(rows, seed=1, weights=None, host=0, hosts=1, **changes):
    rows = rows if isinstance(rows, list) else [rows]
    sources = list(zip(rows, weights or [100] * len(rows), strict=True))
    return TrainBatches(sources, _config(rows[0].sequence_length, **changes), seed, host=host, hosts=hosts)


def _taken(batches, count):
    """The rows of the next `count` batches, each as bytes."""
    return [row.tobytes() for _ in range(count) for row in next(batches)["labels"]]


def test_training_takes_every_row_once_an_epoch_in_a_new_order():
    rows = _rows(39)  # 10 rows, all different
    every = sorted(rows[i]["labels"].tobytes() for i in range(len(rows)))
    assert len(set(every)) == len(rows) == 10
    taken = _taken(_batches(rows, seed=5), 10)  # 30 rows: 3 epochs, batches straddle them
    epochs = [taken[:10], taken[10:20], taken[20:]]
    assert all(sorted(epoch) == every for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(every)}) == 4


def test_training_batches():
    batch = next(_batches(Rows(_corpus(range(5), range(9), range(30)), 8), batch_size=2))
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        key: ((2, 8), np.int32) for key in ("input_ids", "labels", "segment_ids")
    }


def test_no_seed_nor_source_repeats_the_orders_of_another():
    """grain adds the epoch to a seed: neighbouring seeds would be the same orders, an epoch later."""
    orders = []
    for seed in range(3):
        taken = _taken(_batches(_rows(39), seed), 10)
        orders += [tuple(taken[:10]), tuple(taken[10:20]), tuple(taken[20:])]
    same = Rows(_corpus(range(39)), 4)
    mixed = _taken(_batches([same, same], 0, batch_size=2), 10)
    assert len(set(orders)) == 9 and mixed[::2] != mixed[1::2]


def test_training_order_is_decided_by_the_seed():
    orders = [_taken(_batches(_rows(200), seed), 40) for seed in (1, 1, 2, 2**32 - 1)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("stops", [(1,), (0, 5), (10, 11, 20)])
def test_training_resumes_where_it_stopped(stops):
    straight = _taken(_batches(_rows(39)), 25)
    taken, batches = [], _batches(_rows(39))
    for step in range(25):
        if step in stops:
            state = json.loads(json.dumps(batches.get_state()))
            batches = _batches(_rows(39))
            batches.set_state(state)
        taken += _taken(batches, 1)
    assert taken == straight


def test_training_reads_nothing_ahead(monkeypatch):
    read = []
    get = Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda self, index: read.append(index) or get(self, index))
    batches = _batches(_rows(100))
    next(batches)
    next(batches)
    assert len(read) == 6


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_share_the_rows_of_each_batch(hosts):
    together = _taken(_batches(_rows(90), batch_size=6), 12)
    shares = [_batches(_rows(90), batch_size=6, host=host, hosts=hosts) for host in range(hosts)]
    size = 6 // hosts
    for step in range(12):
        if step == 5:  # from here on with other hosts; every one of them has the same position
            states = [share.get_state() for share in shares]
            assert states == [{"rows": 30}] * hosts
            hosts, size = 1, 6
            shares = [_batches(_rows(90), batch_size=6)]
            shares[0].set_state(states[0])
        rows = [row.tobytes() for share in shares for row in next(share)["labels"]]
        assert len(rows) == hosts * size
        assert sorted(rows) == sorted(together[step * 6 : (step + 1) * 6])
    with pytest.raises(InputError, match=r"data\.batch_size is 3; it must be a multiple of the 2 processes"):
        _batches(_rows(90), hosts=2)


def test_a_mixture_draws_by_weight_and_each_source_in_full():
    low, high = Rows(_corpus(range(47)), 4), Rows(_corpus(range(100, 147)), 4)  # 12 rows each
    batches = _batches([low, high], weights=[300, 100], batch_size=4)
    taken = [bytes(row[row < 256].tolist()) for _ in range(12) for row in next(batches)["labels"]]
    counts = [sum(row[0] < 100 for row in taken), sum(row[0] >= 100 for row in taken)]
    assert counts == [36, 12]
    assert len({row for row in taken if row[0] >= 100}) == 12  # once
    assert all(taken.count(row) == 3 for row in taken if row[0] < 100)  # three epochs
    shares = [sum(row[0] < 100 for row in taken[at : at + 8]) for at in range(0, 48, 8)]
    assert set(shares) == {6}  # nor in lumps


def test_fewer_rows_than_a_batch_are_refused():
    rows = _rows(11)
    assert len(rows) == 3 and len(_taken(_batches(rows), 1)) == 3
    with pytest.raises(
        InputError, match=r"data\.batch_size: 4 rows .* only 3 rows of data\.sequence_length 4"
    ) as error:
        _batches(rows, batch_size=4)
    one_line(error)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7])
def test_evaluation_takes_every_row_once_in_an_order_of_its_own(batch_size):
    sources = [Rows(_corpus(range(5), range(0), range(9), range(1)), 4), _rows(40)]  # 5 and 11 rows
    batches = list(eval_batches(sources, batch_size))
    count = sum(map(len, sources))
    assert len(batches) == -(-count // batch_size)
    for key in ("input_ids", "labels", "segment_ids"):
        assert all(batch[key].shape == (batch_size, 4) and batch[key].dtype == np.int32 for batch in batches)
        together = np.concatenate([batch[key] for batch in batches])
        every = [rows[i][key].tolist() for rows in sources for i in range(len(rows))]
        assert together[:count].tolist() != every and sorted(together[:count].tolist()) == sorted(every)
        assert together[:count].tolist() == np.concatenate([b[key] for b in eval_batches(sources, count)]).tolist()
        filling = {"input_ids": END, "labels": IGNORED_LABEL, "segment_ids": 0}[key]
        assert (together[count:] == filling).all()


# --- Workers


SCRIPT = """
import sys
from qwen3next.config import DataConfig
from qwen3next.data.batches import TrainBatches
from qwen3next.data.texts import read_texts
from qwen3next.tokenizer import ByteTokenizer

def batches(source, workers, **changes):
    config = DataConfig(source=(source,), workers=workers, sequence_length=8, batch_size=4, held_out=0.5, **changes)
    texts = read_texts(config, ByteTokenizer(), 257, 0)
    return TrainBatches([(text.train, text.weight) for text in texts], config, 0)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)) * 4)
    return str(path)


def _python(*arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **pipes, **options)


def test_any_number_of_workers_makes_the_same_batches():
    rows = _rows(79)  # 20 rows
    straight = _taken(_batches(rows), 21)
    assert sorted(straight[:20]) == sorted(rows[i]["labels"].tobytes() for i in range(20))
    done, state = 0, {"rows": 0}
    for workers in (2, 3, 0):  # each goes on where the one before stopped
        with _batches(rows, workers=workers) as batches:
            batches.set_state(state)
            assert _taken(batches, 7) == straight[done : done + 21]
            done, state = done + 21, batches.get_state()


def test_workers_in_a_command_line_program(source):
    program = (
        SCRIPT + "with batches(sys.argv[1], 2) as some:\n    print([next(some)['labels'].sum() for _ in range(9)])"
    )
    process = _python("-c", program, source)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and not errors, errors
    plain = _python("-c", program.replace("sys.argv[1], 2", "sys.argv[1], 0"), source)
    assert out == plain.communicate(timeout=120)[0]


def _children(pid):
    """The processes that a process has started, and those that they have."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    own = [child for child, parent in pairs if parent == pid]
    return own + [grandchild for child in own for grandchild in _children(child)]


def _alive(pids):
    return [
        pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]


LOOP = (
    SCRIPT
    + """
import signal, time
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in the background
    with batches(sys.argv[1], 2) as some:
        for number in range(10_000):
            next(some)
            if number == 3:
                print("third", flush=True)
                if sys.argv[2] == "raise":
                    raise ValueError("in the loop")
            time.sleep(0.01)
"""
)


@pytest.mark.parametrize("end", ["raise", "interrupt", "end", "kill"])
def test_no_worker_outlives_the_training_loop(tmp_path, source, end):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    process = _python(str(script), source, end, start_new_session=True)
    assert process.stdout.readline() == "third\n"
    children, began = _children(process.pid), time.monotonic()
    if end in ("interrupt", "end"):  # as a terminal or a scheduler does it: the whole group
        os.killpg(process.pid, signal.SIGINT if end == "interrupt" else signal.SIGTERM)
    elif end == "kill":
        process.kill()
    _, errors = process.communicate(timeout=60)
    while _alive(children) and time.monotonic() - began < 10:
        time.sleep(0.05)
    assert not _alive(children) and time.monotonic() - began < 10
    assert process.returncode != 0 and (len(children) >= 2 or end == "raise")
    told = {"raise": "ValueError: in the loop", "interrupt": "KeyboardInterrupt"}.get(end, "")
    assert errors.strip().endswith(told) and errors.count("Traceback") == bool(told), errors


def test_an_interruption_while_workers_start(tmp_path, source):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    process = _python(str(script), source, "", start_new_session=True)
    while len(_children(process.pid)) < 3:  # two workers, and what tracks resources
        time.sleep(0.01)
    time.sleep(0.3)
    children, began = _children(process.pid), time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    while _alive(children) and time.monotonic() - began < 10:
        time.sleep(0.05)
    assert not _alive(children) and time.monotonic() - began < 10
    assert process.returncode != 0 and errors.count("Traceback") == 1 and "KeyboardInterrupt" in errors, errors


def test_what_a_worker_cannot_do_is_raised_where_the_batch_is_asked_for(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(400, dtype=np.uint16).clip(0, 255).tofile(path)
    config = _config(8, source=(str(path),), workers=2)
    (text,) = read_texts(config, ByteTokenizer(), 257, 0)
    path.unlink()  # each worker opens the file for itself
    gone = pytest.raises(InputError, match=r"cannot read '.*a\.bin': No such file")
    with TrainBatches([(text.train, 100)], config, 0) as batches, gone:
        next(batches)


def test_a_worker_that_is_killed_is_told_of():
    with _batches(_rows(79), workers=2) as batches:
        next(batches)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        with pytest.raises(InputError, match=r"data\.workers: one of 2 has ended .*exit code -9") as error:
            for _ in range(100):
                next(batches)
        one_line(error)


def test_the_number_of_workers_is_bounded():
    for workers in (-1, 65):
        with pytest.raises(InputError, match=r"data\.workers is .*; it must be 0 to 64"):
            dataclasses.replace(_config(), workers=workers)
