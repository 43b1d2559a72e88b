"""Reading HLO text: arrays in memory, loops, and the devices of a collective."""

import pytest

from tests.plan.programs import TEXT
from vit_jax.plan import hlo


@pytest.fixture(scope="module")
def program():
    return hlo.parse(TEXT)


def find(program, name):
    return next(i for computation in program.computations.values() for i in computation if i.name == name)


def test_computations_and_their_order(program):
    assert program.entry == "main"
    assert [i.name for i in program.computations["condition"]] == ["state", "length", "counter", "less"]
    assert find(program, "before").operands == ("zero", "kept", "beside")


def test_cycles_sources_and_loops(program):
    assert find(program, "work").cycles == 1000
    assert find(program, "fetched").cycles is None
    assert find(program, "while.1").source == "jit(train_step)/jvp()/while"
    assert program.trip_count(find(program, "while.1")) == 3
    assert find(program, "work").called == ("add",)


def test_a_loop_of_unknown_length():
    text = TEXT.replace("%length = s32[]{:T(128)} constant(3)", "%length = s32[]{:T(128)} parameter(1)")
    program = hlo.parse(text)
    assert program.trip_count(find(program, "while.1")) is None


@pytest.mark.parametrize(
    ("shape", "plain", "padded", "is_in_hbm"),
    [
        ("f32[12,100]{1,0:T(8,128)}", 4800, 16 * 128 * 4, True),
        ("f32[12,100]{0,1:T(8,128)}", 4800, 104 * 128 * 4, True),
        ("bf16[64,197,768]{2,1,0:T(8,128)(2,1)S(1)}", 64 * 197 * 768 * 2, 64 * 200 * 768 * 2, False),
        ("f32[768]{0:T(1024)}", 3072, 4096, True),
        ("s32[]{:T(128)}", 4, 4, True),
        ("pred[8]", 8, 8, True),
        ("u8[64,224,224,3]{2,1,3,0:T(32,128)(4,1)}", 64 * 224 * 224 * 3, 64 * 3 * 224 * 256, True),
    ],
)
def test_arrays(shape, plain, padded, is_in_hbm):
    (array,) = hlo.Instruction("x", shape, "add", "").arrays
    assert (array.num_bytes, array.padded_bytes, array.is_in_hbm) == (plain, padded, is_in_hbm)


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [0, 1, 2, 3]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [0, 4]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0','axis_1'}", [0, 1, 2, 3]),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", [0, 1, 2, 3]),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}", [0, 4]),
        ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("replica_groups={{0,2},{1,3}}", [0, 2]),
        ("source_target_pairs={{0,1},{1,0}}", [0, 1]),
    ],
)
def test_members(groups, members):
    collective = hlo.Instruction("x", "f32[2]", "all-reduce", f"%y), channel_id=1, {groups}, to_apply=%add")
    assert hlo.members(collective) == members


def test_groups_in_an_unknown_form():
    with pytest.raises(ValueError, match="unknown form"):
        hlo.members(hlo.Instruction("x", "f32[2]", "all-reduce", "%y)"))
