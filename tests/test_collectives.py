"""Collectives counted in the text of a compiled program: in one by hand of each form, and in one that is compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen3next.collectives import count_collectives, network_facts

ROOT = Path(__file__).parent.parent
EIGHT = "{{0,1,2,3,4,5,6,7}}"


def computation(name: str, *lines: str) -> str:
    return "\n".join((f"{name} (y: f32[8]) -> f32[8] {{", *(f"  {line}" for line in lines), "}\n"))


def entry(*lines: str, rest: str = "") -> str:
    """A program for eight devices: these lines, and other computations."""
    return f"HloModule step, is_scheduled=true, num_partitions=8\n\n{rest}\n{computation('ENTRY %main', *lines)}"


def figures(program: str) -> dict[str, tuple[int, int]]:
    return {found.kind: (found.count, found.bytes) for found in count_collectives(program)}


# --- one collective ---------------------------------------------------------------------------------------------------

FORMS = {
    f"f32[64,32]{{1,0}} all-gather(%x), replica_groups={EIGHT}": ("all-gather", 64 * 32 * 4 * 7 // 8),
    f"bf16[8,32]{{1,0:T(8,128)(2,1)S(1)}} reduce-scatter(%x), replica_groups={EIGHT}": (
        "reduce-scatter",
        8 * 32 * 2 * 7,
    ),
    f"f32[64] all-reduce(%x), replica_groups={EIGHT}, to_apply=%add": ("all-reduce", 2 * 64 * 4 * 7 // 8),
    f"f32[64] all-to-all(%x), replica_groups={EIGHT}, dimensions={{0}}": ("all-to-all", 64 * 4 * 7 // 8),
    f"s8[64] ragged-all-to-all(%x, %y), replica_groups={EIGHT}": ("ragged-all-to-all", 64 * 7 // 8),
    "pred[64] collective-permute(%x), source_target_pairs={{0,1},{1,0}}": ("collective-permute", 64),
    f"c64[64] collective-broadcast(%x), replica_groups={EIGHT}": ("collective-broadcast", 512),
    "f8e4m3fn[64] all-gather(%x), replica_groups={}": ("all-gather", 56),
    # groups
    "f32[64] all-gather(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}": ("all-gather", 128),
    "f32[64] all-gather(%x), replica_groups=[2,4]<=[8]": ("all-gather", 192),
    "f32[64] all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}": ("all-gather", 128),
    "f32[64] all-gather(%x), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}": ("all-gather", 192),
    "f32[64] all-gather(%x), replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','b'}": ("all-gather", 192),
    "f32[64] all-gather(%x), replica_groups=mesh['a'=8] {'a':(2)4}": ("all-gather", 192),
    "f32[64] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}": None,
    "f32[64] all-reduce(%x), replica_groups=[8,1]<=[8]": None,
    "f32[64] collective-permute(%x), source_target_pairs={{0,0},{1,1}}": None,
    # tuples
    f"(f32[16,4]{{1,0}}, /*index=1*/bf16[8], f32[]) all-reduce(%x, %y, %z), replica_groups={EIGHT}": (
        "all-reduce",
        2 * (256 + 16 + 4) * 7 // 8,
    ),
    f"(f32[1,32], f32[1,32], f32[1,32], f32[1,32]) all-to-all(%a, %b, %c, %d), replica_groups={EIGHT}": (
        "all-to-all",
        512 * 7 // 8,
    ),
    # starts: operands, results, and what else there is
    f"(f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%x), replica_groups={EIGHT}": ("all-gather", 224),
    f"((f32[8], f32[1]), (f32[64], f32[8])) all-gather-start(%x, %y), replica_groups={EIGHT}": ("all-gather", 252),
    f"((f32[64]{{0}}), f32[8]{{0}}, s32[]) reduce-scatter-start(%x), replica_groups={EIGHT}": ("reduce-scatter", 224),
    f"(f32[64], f32[8]) all-reduce-start(%x, %y), replica_groups={EIGHT}": ("all-reduce", 504),
    "(f32[64]{0:T(8,128)}, f32[64]{0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), "
    "source_target_pairs={{0,1}}": ("collective-permute", 256),
}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_of_one_execution(form):
    expected = FORMS[form]
    found = figures(entry("%x = f32[8]{0} parameter(0)", f"ROOT %y = {form}"))
    assert found == ({expected[0]: (1, expected[1])} if expected else {})


def test_a_start_and_its_end_are_one():
    start = f"%s = (f32[8], f32[64]) all-gather-start(%x), replica_groups={EIGHT}"
    assert figures(entry(start, "ROOT %d = f32[64] all-gather-done(%s)")) == {"all-gather": (1, 224)}
    wrapped = computation("%wrapped", f"ROOT %r = f32[8] reduce-scatter(%y), replica_groups={EIGHT}")
    start = "%s = ((f32[64]), f32[8], s32[]) async-start(%x), calls=%wrapped"
    lines = ("%u = ((f32[64]), f32[8], s32[]) async-update(%s), calls=%wrapped", "ROOT %d = f32[8] async-done(%u), ")
    assert figures(entry(start, lines[0], lines[1] + "calls=%wrapped", rest=wrapped)) == {"reduce-scatter": (1, 224)}


# --- what calls them --------------------------------------------------------------------------------------------------


def loop(name: str, *inside: str, trips: int | None) -> str:
    """A loop's computations, as a TPU's are written: a counter that goes up to a constant."""
    body = computation(
        f"%{name}_body",
        f"%{name}_p = (s32[]{{:T(128)}}, f32[8]{{0}}) parameter(0)",
        f"%{name}_one = s32[]{{:T(128)}} constant(1)",
        f'%{name}_next = s32[]{{:T(128)}} add(%{name}_p#0, %{name}_one), metadata={{op_name="while/body/add"}}',
        *inside,
        f"ROOT %{name}_t = (s32[], f32[8]) tuple(%{name}_next, %{name}_p#1)",
    )
    return body + computation(
        f"%{name}_condition",
        f"%{name}_c = (s32[]{{:T(128)}}, f32[8]{{0}}) parameter(0)",
        f"%{name}_limit = s32[]{{:T(128)}} {'parameter(1)' if trips is None else f'constant({trips})'}",
        f"ROOT %{name}_lt = pred[]{{:T(512)}} compare(%{name}_c#0, %{name}_limit), direction=LT, backend_config={{}}",
    )


def run(name: str, first: int = 0) -> list[str]:
    """The instructions that run it."""
    return [
        f"%{name}_first = s32[]{{:T(128)}} constant({first})",
        f"%{name}_copy = s32[]{{:T(128)}} copy(%{name}_first), backend_config={{}}",
        f"%{name}_start = (s32[], f32[8]) tuple(%{name}_copy, %x)",
        f"%{name} = (s32[], f32[8]) while(%{name}_start), condition=%{name}_condition, body=%{name}_body",
    ]


GATHER = f'%g = f32[64] all-gather(%y), replica_groups={EIGHT}, metadata={{op_name="jit(step)/gather"}}'
REDUCE = f'%r = f32[64] all-reduce(%y), replica_groups={EIGHT}, metadata={{op_name="jit(step)/psum"}}'


def test_loops_multiply():
    inner, outer = loop("inner", GATHER, trips=3), loop("outer", *run("inner", first=1), REDUCE, trips=5)
    assert figures(entry(*run("outer"), rest=inner + outer)) == {"all-gather": (10, 2240), "all-reduce": (5, 2240)}
    *before, outermost = run("outer")
    told = outermost + ', backend_config={"known_trip_count":{"n":"7"}}'
    assert figures(entry(*before, told, rest=inner + outer)) == {"all-gather": (14, 3136), "all-reduce": (7, 3136)}


def test_loops_of_unknown_length_count_once_and_are_told():
    inner, outer = loop("inner", GATHER, trips=None), loop("outer", *run("inner"), REDUCE, trips=5)
    gather, reduce = count_collectives(entry(*run("outer"), rest=inner + outer))[::-1]
    assert (gather.kind, gather.count, gather.open_loops) == ("all-gather", 5, 1)
    assert (reduce.kind, reduce.count, reduce.open_loops) == ("all-reduce", 5, 0)


def test_calls_are_followed_and_of_a_conditional_the_branch_that_receives_most():
    rest = computation("%a", GATHER) + computation("%b", REDUCE)
    assert figures(entry("%f = f32[64] fusion(%x), kind=kCustom, calls=%a", rest=rest)) == {"all-gather": (1, 224)}
    assert figures(entry("%f = f32[64] call(%x), to_apply=%a", rest=rest)) == {"all-gather": (1, 224)}
    for branches in ("branch_computations={%a, %b}", "true_computation=%b, false_computation=%a"):
        found = figures(entry(f"%f = f32[64] conditional(%i, %x, %x), {branches}", rest=rest))
        assert found == {"all-reduce": (1, 448)}


def test_what_a_tpu_fuses():
    """A gather that several fusions move on, one of them in a loop, and a scattered sum that is a slice of a sum."""

    def part(flag: str) -> str:
        config = f'backend_config={{"async_collective_fusion_config":{{"flag_end":"{flag}","flag_start":"{flag}"}}}}'
        return f"%g{flag} = f32[64] all-gather(%y), replica_groups={EIGHT}, {config}"

    fused = "fusion(%x), kind=kCustom"
    rest = computation("%begin", part("-1")) + computation("%async_collective_fusion.1", part("2"))
    rest += loop("inner", f"%inner_f = f32[64] {fused}, calls=%async_collective_fusion.1", trips=16)
    begin = f'%f = f32[64] {fused}, calls=%begin, metadata={{op_name="jit(step)/experts"}}'
    (gather,) = count_collectives(entry(begin, *run("inner"), rest=rest))
    assert (gather.count, gather.bytes, gather.operations) == (1, 224, ["jit(step)/experts"])

    reduce = f"%r = (f32[64], f32[8]) all-reduce(%y, %z), replica_groups={EIGHT}"
    rest = computation("%all-reduce-scatter.2", reduce)
    fusion = f'%f = f32[8] {fused}, calls=%all-reduce-scatter.2, metadata={{op_name="jit(step)/add"}}'
    (scatter,) = count_collectives(entry(fusion, rest=rest))
    assert (scatter.kind, scatter.count, scatter.bytes) == ("reduce-scatter", 1, 252)
    assert scatter.operations == ["jit(step)/add"]


def test_operations_are_named_by_bytes_and_by_what_they_work_on():
    lines = [f'%o{number} = f32[8] add(%x), metadata={{op_name="op{number}"}}' for number in range(5)]
    lines += [f"%b{number} = f32[8] bitcast(%o{number})" for number in range(5)]
    lines += [
        f"%g{number} = f32[{8 * (number + 1)}] all-gather(%b{number}), replica_groups={EIGHT}" for number in range(5)
    ]
    (gather,) = count_collectives(entry(*lines))
    assert gather.count == 5 and gather.operations == ["op4", "op3", "op2"]


def test_facts_of_a_program_and_of_none():
    facts = network_facts(entry(GATHER, REDUCE))
    assert facts["network"] == 224 + 448
    assert facts["collectives"][1] == {
        "kind": "all-gather",
        "count": 1,
        "bytes": 224,
        "operations": ["jit(step)/gather"],
        "open_loops": 0,
    }
    assert network_facts(entry("ROOT %y = f32[8] copy(%x)")) == {"network": 0, "collectives": []}
    with pytest.raises(ValueError, match="its format may have changed"):
        count_collectives("HloModule step")


# --- a program that is compiled ---------------------------------------------------------------------------------------

COMPILED = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

mesh = jax.sharding.Mesh(jax.devices(), ("d",))


def local(x, weights):
    def body(x, weight):
        whole = jax.lax.all_gather(weight, "d", axis=0, tiled=True)
        y = jax.lax.all_to_all(jnp.tanh(x @ whole), "d", 0, 1, tiled=True)
        part = jax.lax.psum_scatter(y.reshape(64, -1), "d", scatter_dimension=0, tiled=True)
        return x + part.sum(), None

    x, _ = jax.lax.scan(body, x, weights)
    return jax.lax.psum(x, "d")


mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P(None, "d")), out_specs=P(), check_vma=False)
shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((5, 64, 32), jnp.float32)
print(jax.jit(mapped).lower(*shapes).compile().as_text())
"""


def test_a_compiled_programs_collectives_are_those_it_was_written_with():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert figures(done.stdout) == {
        "all-gather": (5, 5 * (64 * 32 * 4 * 7 // 8)),
        "all-to-all": (5, 5 * (8 * 32 * 4 * 7 // 8)),
        "reduce-scatter": (5, 5 * (64 * 4 * 4 * 7 // 8)),
        "all-reduce": (1, 2 * 8 * 64 * 4 * 7 // 8),
    }
    for found in count_collectives(done.stdout):
        assert found.open_loops == 0 and found.operations[0].startswith("jit(local)/shard_map/")
