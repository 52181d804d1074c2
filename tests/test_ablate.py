"""ablate.py: its command line, what it says of rows, its child processes, and one small ablation from end to end."""

import csv
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from common import run_config, tiny_config
from rich.console import Console

import ablate
from qwen3next import ablation_table, child
from qwen3next.ablation import Request, peak_bytes
from qwen3next.ablation_table import draw, fitting, relate, show, twins, write_csv
from qwen3next.cli import dump_config
from qwen3next.config import Compute
from qwen3next.errors import InputError
from qwen3next.tpu import read_buffers, topology_devices, topology_name

ROOT = Path(__file__).parent.parent


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    """Two layers of attention, which compiles sooner than the delta rule."""
    config = run_config(tmp_path, accumulate=2)
    model = tiny_config(num_hidden_layers=2, full_attention_interval=1, vocab_size=257)
    compute = Compute(dispatch="dense", chunk_size=8)
    path = tmp_path / "small.toml"
    path.write_text(dump_config(dataclasses.replace(config, model=model, compute=compute)))
    return path


# --- command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["none", "layer/dots"], ["none", "layer/dots"]),
        (["none,block, layer both"], ["none", "block", "layer", "both"]),
        (["layer/names:conv_out,q_proj,none"], ["layer/names:conv_out,q_proj", "none"]),
        (["moe,linear_attention+moe/dots,layer/no-barrier"], ["moe", "linear_attention+moe/dots", "layer/no-barrier"]),
        (["none", "none,layer/nothing", "layer"], ["none", "layer"]),
    ],
)
def test_choices_are_split_at_commas_that_are_not_between_names(texts, expected):
    assert list(map(str, ablate.split_choices(texts))) == expected


def test_twelve_choices_are_the_default():
    assert tuple(map(str, ablate.split_choices(None))) == ablate.CHOICES and len(ablate.CHOICES) == 12


def test_numbers_and_bytes():
    assert ablate.split_numbers("--batch", ["4,8", "4", "16"]) == [4, 8, 16]
    amounts = {"16GB": 16 * 10**9, "16 GiB": 2**34, "1.5mb": 1_500_000, "7": 7}
    assert {text: ablate.parse_bytes(text) for text in amounts} == amounts


BAD = {
    "--remat everywhere": "placement 'everywhere' is unknown",
    "--remat layer/dot": "policy 'dot' is unknown, did you mean dots",
    "--remat layer/names:conv": "name 'conv' is unknown",
    "--remat none --baseline layer": "--baseline layer is not among the choices",
    "--compute.remat layer": "the choices to compare are given by --remat",
    "--batch 3": "--batch 3 must be a multiple of run.accumulate, 2",
    "--batch 0": "--batch '0' is not a whole number above 0",
    "--length 1e3": "--length '1e3' is not a whole number",
    "--budget lots": "--budget 'lots' is not an amount of memory",
    "--run -1": "--run is -1",
    "--model.hidden-sizes 3": "--model.hidden-sizes",
    "--batches 3": "--batches",
    "--top v5e:4x4": "--top",
    "--topology v5p-100": "v5p comes as v5p-8, v5p-16",
    "--topology v5e:4x4 --run 1": "--run needs a machine that is there",
    "--out /dev/null/x": "--out /dev/null/x cannot be written",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_before_anything_runs(preset, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablate, "ask", lambda *_, **__: pytest.fail("a row began"))
    monkeypatch.setattr(ablate, "require_tpu_extra", lambda: None)
    with pytest.raises(InputError) as caught:
        ablate.main(["ablate.py", str(preset), *flags.split()])
    assert BAD[flags] in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "ablations").exists()


def test_missing_extras_are_named(preset, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for flags, extra in ((["--picture"], "plots"), (["--topology", "v5p-8"], "tpu")):
        with pytest.raises(InputError, match=rf"pip install -e '.\[{extra}\]'"):
            ablate.main(["ablate.py", str(preset), *flags])


def test_the_script_exits_with_2():
    command = [sys.executable, "ablate.py", "none.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: none.toml") and done.stderr.count("\n") == 1


# --- rows side by side ------------------------------------------------------------------------------------------------


def make_row(choice: str, temporaries: int | None, flops: int = 100, **more) -> dict:
    row = {"choice": choice, "batch": 4, "length": 32, "temporaries": temporaries, "flops": flops, "arguments": 50}
    row |= {"outputs": 50, "aliased": 40, "code": None, "recompute": flops / 100 - 1, "regions": 1} | more
    return row | {"peak": peak_bytes(row)}


def test_peak_is_the_sum_of_what_is_known():
    assert make_row("none", 7)["peak"] == 50 + 50 - 40 + 7 and make_row("none", 7, code=5)["peak"] == 72
    assert make_row("none", None)["peak"] is None


def test_figures_are_related_to_the_baseline_of_the_same_batch_and_length():
    rows = [make_row("none", 200, losses=[1.0, 2.0]), make_row("layer", 50, 130, losses=[1.0, 1.75])]
    rows += [make_row("layer", 80, length=64), make_row("none", 160, length=64), make_row("both", None)]
    none, layer, longer, _, failed = relate(rows, "none")
    assert layer["relative"]["temporaries"] == 0.25 and layer["relative"]["flops"] == 1.3
    assert layer["loss_difference"] == 0.25 and none["loss_difference"] == 0
    assert longer["relative"]["temporaries"] == 0.5 and "loss_difference" not in longer
    assert "temporaries" not in failed["relative"] and "code" not in layer["relative"]


def test_choices_with_equal_statistics_are_told():
    rows = [make_row("layer", 5), make_row("layer/names:conv_out", 5), make_row("both", 5, 101)]
    rows += [make_row("moe", None), make_row("dense", None), make_row("none", 5, length=64)]
    assert twins(rows) == ["warning: layer/names:conv_out costs exactly what layer does; it may have changed nothing"]


def test_the_budget_takes_the_fewest_flops_that_fit():
    rows = [make_row("none", 900), make_row("layer", 200, 130), make_row("layer/dots", 300, 110), make_row("x", None)]
    rows += [make_row("both", 100, 110, length=64), make_row("block", 90, 110, length=64)]
    assert fitting(rows, 400) == [
        "budget 400 B, 4 x 32: layer/dots is the cheapest that fits, peak 360 B, 10.0% recomputed",
        "budget 400 B, 4 x 64: block is the cheapest that fits, peak 150 B, 10.0% recomputed",
    ]
    assert fitting(rows[:3], 100) == [
        "budget 100 B, 4 x 32: none of 3 fits; the smallest, layer, needs 260 B, 160 B more"
    ]
    assert fitting([make_row("none", None)], 1) == ["budget 1 B: no choice has a known peak"]


ROWS = [
    make_row("none", 218_000_000, losses=[5.5, 5.25], step_seconds=0.5, compile_seconds=12.0),
    make_row(
        "layer/names:qkvz_proj,conv_out,delta_out,q_proj,k_proj,v_proj,attention_out",
        54_000_000,
        130,
        losses=[5.5, 5.25],
    ),
    {"choice": "moe", "batch": None, "length": 32, "error": "killed by signal 9"},
]
ROWS[0]["saved"] = {"full_attention/moe": [{"name": "q_proj", "bytes": 3000}, {"name": "q_proj", "bytes": 1000}]}
ROWS[1]["network"] = 3_000_000
ROWS[1]["collectives"] = [
    {
        "kind": "all-gather",
        "count": 84,
        "bytes": 2_500_000,
        "operations": ["jit(step)/" + "gather/" * 9],
        "open_loops": 0,
    },
    {"kind": "all-reduce", "count": 7, "bytes": 500_000, "operations": ["jit(step)/psum"], "open_loops": 2},
]
ROWS[1]["largest"] = [{"bytes": 2_000_000, "shape": "f32[4,8]", "operation": "jit(step)/" + "experts/" * 30}]


@pytest.mark.parametrize("width", [80, 140, 240])
def test_tables_fit_their_console(width, capsys):
    show(relate(ROWS, "none"), Console(width=width))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "218.00 MB 1.00x" in out and "q_proj 4.00 KB" in out and "2.00 MB f32[4,8] jit(step)/experts" in out
    assert "2.50 MB by 84 x all-gather, most for jit(step)/gather" in out
    assert "500.00 KB by 7 x all-reduce at least (2 loops of unknown length" in out
    assert "failed: moe, ? x 32: killed by signal 9" in out
    headings = out.splitlines()[1]
    assert ("network" in headings, "compile" in headings, "outputs" in headings) == (width > 100, *[width > 200] * 2)
    assert "code" not in out  # no row knows it


def test_csv_has_every_field(tmp_path):
    write_csv(ROWS, tmp_path / "rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [row["choice"] for row in rows] == [row["choice"] for row in ROWS]
    assert rows[0]["code"] == "" and json.loads(rows[0]["losses"]) == [5.5, 5.25] and rows[2]["error"]


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(ROWS, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


# --- machines that are not there --------------------------------------------------------------------------------------


def test_names_of_machines():
    name, settings = topology_name("v5p-256")
    assert name == "v5:4x4x8" and settings["chip_config_name"] == "megacore"
    assert topology_name("v5p-8")[0] == "v5:2x2x1" and topology_name("v5e-16") == ("v5e:4x4", {})
    assert topology_name("v6e-256") == ("v6e:16x16", {}) and topology_name("tpu7x:2x2x1") == ("tpu7x:2x2x1", {})


ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, page 0, thread-local:
 value: <8717 reduce_sum.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 786432, page 0, parameter 16, shape |f32[1,3,8,128,64]| at ShapeIndex {}, maybe-live-out:
 value: <12515 param.37 @0> (size=786432,offset=0): f32[1,3,8,128,64]{3,4,2,1,0:T(8,128)}
allocation 2: size 4096, page 0, parameter 17, shape |s32[4,256]| at ShapeIndex {}:
 value: <12516 param.38 @0> (size=4096,offset=0): s32[4,256]{1,0:T(4,128)}
allocation 3: size 77824, page 0, constant:
 value: <12517 constant.1 @0> (size=77824,offset=0): f32[152,128]{1,0:T(8,128)}
allocation 4: size 480, page 0, output shape is |(f32[])|, maybe-live-out:
 value: <12518 tuple.1{} @0> (size=480,offset=0): (f32[]{:T(128)}, f32[]{:T(128)})
allocation 5: size 9000000, page 0, preallocated-temp:
 value: <592 while.1{3} (phi) @0> (size=4000000,offset=512): f32[1000,1000]{1,0:T(8,128)}
 value: <593 fusion.12 @0> (size=4000000,offset=512): f32[1000,1000]{1,0:T(8,128)}
 value: <594 copy-start.1{0} @0> (size=4000000,offset=4000512): bf16[2000,1000]{1,0:T(8,128)}
 value: <595 lt.149 @0> (size=512,offset=0): pred[]{:T(512)}
allocation 6: size 36557312, color 1, page 0, preallocated-temp:
 value: <9339 fusion.13 @1> (size=8000000,offset=20): f32[2000,1000]{1,0:T(8,128)S(1)}
"""
PROGRAM = """ENTRY %main {
  %fusion.12 = f32[1000,1000]{1,0:T(8,128)} fusion(%a), kind=kOutput, metadata={op_name="jit(step)/jvp(experts)/dot"}
  ROOT %copy-start.1 = (bf16[2000,1000], u32[]) copy-start(%fusion.9#0), backend_config={}
  %fusion.9 = bf16[2000,1000] fusion(%a), metadata={op_name="jit(step)/lm_head/dot"}
  %all-gather.1 = f32[1000] all-gather(%a), replica_groups=[1,4]<=[4], metadata={op_name="jit(step)/gather"}
}
"""


def test_buffers_are_read_from_the_compilers_text():
    found = read_buffers(ASSIGNMENT, PROGRAM)
    largest = found.pop("largest")
    assert found == {"temporaries": 9_000_000, "arguments": 790_528, "outputs": 786_912, "aliased": 786_432}
    assert largest[:2] == [
        {"bytes": 4_000_000, "shape": "bf16[2000,1000]", "operation": "jit(step)/lm_head/dot"},
        {"bytes": 4_000_000, "shape": "f32[1000,1000]", "operation": "jit(step)/jvp(experts)/dot"},
    ]
    assert [buffer["bytes"] for buffer in largest[2:]] == [512]
    with pytest.raises(ValueError, match="its format may have changed"):
        read_buffers("BufferAssignment: {}", PROGRAM)


# --- child processes --------------------------------------------------------------------------------------------------

REQUEST = Request(config="", batch=1)


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """The child becomes a shell script; it notes its process id."""
    path = folder / "child.sh"
    path.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(path))


def assert_gone(folder: Path) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -9 $$", "killed by signal 9, as the system does when memory runs out"),
        ("echo ValueError: too large >&2; echo '' >&2; echo More above. >&2; exit 1", "ValueError: too large"),
        ("exit 3", "it said nothing"),
    ],
)
def test_a_failed_child_is_a_row_that_keeps_what_was_told(tmp_path, monkeypatch, script, error):
    pretend(monkeypatch, tmp_path, f"""echo '{{"flops": 3}}'; {script}""")
    assert child.ask(REQUEST) == {"flops": 3, "error": error}


def test_a_childs_bad_input_is_bad_input(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path, "echo noise >&2; echo error: run.steps is odd >&2; exit 2")
    with pytest.raises(InputError, match=r"^run.steps is odd$"):
        child.ask(REQUEST)


def test_a_compilation_is_ended_once_its_buffers_are_known(tmp_path, monkeypatch):
    (tmp_path / "assignment").write_text(ASSIGNMENT)
    (tmp_path / "program").write_text(PROGRAM)
    name = "$to/module_0.jit_train_step.after_optimizations"
    copies = f"cp {tmp_path}/assignment {name}-buffer-assignment.txt; cp {tmp_path}/program {name}.txt"
    find = r"""to=$(echo "$XLA_FLAGS" | sed 's/.*--xla_dump_to=\([^ ]*\).*/\1/')"""
    pretend(monkeypatch, tmp_path, f"""echo '{{"flops": 3}}'; {find}; {copies}; exec sleep 60""")
    facts = child.ask(dataclasses.replace(REQUEST, topology="v5p-8"))
    assert facts["flops"] == 3 and facts["temporaries"] == 9_000_000 and facts["peak"] == 9_791_008
    assert "error" not in facts and len(facts["largest"]) == 3
    assert facts["network"] == 3000 and facts["collectives"][0]["operations"] == ["jit(step)/gather"]
    assert_gone(tmp_path)
    (tmp_path / "assignment").write_text("something else")
    assert "format may have changed" in child.ask(dataclasses.replace(REQUEST, topology="v5p-8"))["error"]


def test_ctrl_c_keeps_the_finished_rows_and_leaves_no_child(preset, tmp_path, monkeypatch, capsys, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    answer = json.dumps(make_row("none", 5))
    pretend(monkeypatch, tmp_path, f"mkdir {tmp_path}/first && echo '{answer}' && exit 0; exec sleep 60")
    out = tmp_path / "out"
    timer = threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    assert ablate.main(["ablate.py", str(preset), "--remat", "none", "layer", "--out", str(out)]) == 130
    assert_gone(tmp_path)
    assert [row["choice"] for row in json.loads((out / "ablation.json").read_text())] == ["none"]
    assert len((out / "rows.jsonl").read_text().splitlines()) == 1
    assert "interrupted after 1 of 2 rows" in capsys.readouterr().out


# --- from end to end --------------------------------------------------------------------------------------------------


def test_a_small_ablation(preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setattr(ablation_table, "can_draw", lambda: False)
    monkeypatch.setattr(ablate, "can_draw", lambda: False)
    command = ["ablate.py", str(preset), "--remat", "layer,none", "--baseline", "none", "--run", "1", "--budget", "1GB"]
    assert ablate.main([*command, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    layer, none = json.loads((tmp_path / "out/ablation.json").read_text())
    assert (none["choice"], layer["choice"]) == ("none", "layer")
    assert none["recompute"] == 0 and 0.2 < layer["recompute"] < 0.4
    assert (none["regions"], layer["regions"]) == (0, 2 * 2)  # two microbatches of two layers
    assert 0 < layer["temporaries"] < none["temporaries"] and layer["relative"]["temporaries"] < 1
    assert none["code"] is None and none["peak"] > none["arguments"] > none["aliased"] > 0
    assert none["losses"] == pytest.approx(layer["losses"], abs=1e-5) and none["step_seconds"] > 0
    assert {value["name"] for value in layer["saved"]["full_attention/moe"]} == {"unit input"}
    assert set(none["versions"]) == {"jax", "jaxlib", "python"} and none["backend"] == "cpu"
    assert "4 x 32: none is the cheapest that fits" in out
    assert "losses, nats a token" in out and "no picture: it needs matplotlib" in out
    assert "1/2  layer, 4 x 32" in out and "min left" in out


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
def test_a_step_is_compiled_for_a_machine_that_is_not_there(preset, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    facts = child.ask(Request(preset.read_text(), batch=2, topology="v5e:2x2"))
    assert "error" not in facts, facts["error"]
    assert facts["devices"] == 4 and facts["temporaries"] > 0 and facts["peak"] > facts["arguments"]
    assert "libtpu" in facts["versions"] and "compile_seconds" not in facts
    assert facts["network"] > 0 and any("gather" in found["operations"][0] for found in facts["collectives"])
    assert any("jit(" in buffer["operation"] for buffer in facts["largest"])
    with pytest.raises(InputError, match=r"topology 'v9:2x2' is unknown .*; allowed: v4-8"):
        topology_devices("v9:2x2")
