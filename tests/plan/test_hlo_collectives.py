"""Groups and bytes of collectives; start and end of asynchronous ones."""

import numpy as np
import pytest

from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.plan.hlo.collectives import Collective, awaited, group, started


@pytest.mark.parametrize(
  ("text", "members"),
  [("replica_groups={{0,4,8},{1,5,9}}", (0, 4, 8)),
   ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
   ("source_target_pairs={{3,7},{7,3}}", (3, 7)),
   ("to_apply=%sum", tuple(range(16)))],
)  # fmt: skip
def test_the_first_group(text, members):
  assert group(f", channel_id=1, {text}, x=1", 16) == members


@pytest.mark.parametrize(
  ("shape", "order", "size"),
  [((4, 2), (1, 0), 4), ((2, 3, 4), (2, 0, 1), 6), ((2, 3, 4), (1, 2, 0), 2)],
)
def test_iota_groups_against_numpy(shape, order, size):
  devices = np.prod(shape)
  whole = np.arange(devices).reshape(shape).transpose(order).reshape(-1, size)
  text = (
    f"replica_groups=[{devices // size},{size}]<=[{','.join(map(str, shape))}]"
    f"T({','.join(map(str, order))})"
  )
  assert group(text, devices) == tuple(whole[0])


@pytest.mark.parametrize(
  ("axes", "taken"),
  [("'a'", np.s_[:, 0]), ("'b'", np.s_[0, :]), ("'a','b'", np.s_[:, :]),
   ("'a':(2)4", np.s_[0:8:2, 0]), ("'a':(1)2,'b'", np.s_[0:16:8, :])],
)  # fmt: skip
def test_mesh_groups_against_numpy(axes, taken):
  text = f"replica_groups=mesh['a'=16,'b'=4] {{{axes}}}, use_global=true"
  whole = np.arange(64).reshape(16, 4)
  assert group(text, 64) == tuple(whole[taken].flatten())


@pytest.mark.parametrize("n", [2, 4, 16])
def test_wire_bytes(n):
  members, size = tuple(range(n)), 4800.0
  wire = lambda kind, result: Collective(kind, members, result).wire
  # In a ring a device sends a share to its neighbour in each hop.
  for kind, result, hops in (
    ("all-gather", size, n - 1), ("all-reduce", size, 2 * n - 2),
    ("reduce-scatter", size / n, n - 1),
  ):  # fmt: skip
    assert wire(kind, result) == hops * size / n
  # A device keeps its own share and sends the rest.
  assert wire("all-to-all", size) == size - size / n
  assert wire("collective-permute", size) == size


TEXT = """
%scattered (a: f32[64]) -> f32[16] {
  %a = f32[64]{0} parameter(0)
  %n = u32[] constant(0)
  %sum = f32[64]{0} all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %mine = f32[16]{0} dynamic-slice(%sum, %n), dynamic_slice_sizes={16}
}

%begin (a: f32[16]) -> (f32[16], f32[64]) {
  %a.1 = f32[16]{0} parameter(0)
  %g.1 = f32[64]{0} all-gather(%a.1), channel_id=7, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
  ROOT %c.1 = (f32[16]{0}, f32[64]{0}) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%link (a: f32[16]) -> f32[16] {
  %a.2 = f32[16]{0} parameter(0)
  %g.2 = f32[64]{0} all-gather(%a.2), channel_id=7, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
  ROOT %c.2 = f32[16]{0} add(%a.2, %a.2)
}

%finish (a: f32[16]) -> f32[64] {
  %a.3 = f32[16]{0} parameter(0)
  %g.3 = f32[64]{0} all-gather(%a.3), channel_id=7, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
  ROOT %c.3 = f32[64]{0} custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %w = f32[64]{0} parameter(1)
  %y = f32[4]{0} parameter(2)
  %gather = f32[64]{0} all-gather(%x), replica_groups={{0,1,2,3}}
  %scatter = f32[16]{0} fusion(%w), kind=kCustom, calls=%scattered
  %send-start = (f32[16]{0}, f32[16]{0}, u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %send-done = f32[16]{0} collective-permute-done(%send-start)
  %async-start = (f32[16]{0}, f32[64]{0}) fusion(%x), kind=kCustom, calls=%begin
  %middle = f32[16]{0} fusion(%x), kind=kLoop, calls=%link
  %async-done = f32[64]{0} fusion(%x), kind=kCustom, calls=%finish
  %both-start = ((f32[16]{0}, f32[4]{0}), (f32[64]{0}, f32[16]{0})) all-gather-start(%x, %y), replica_groups={{0,1,2,3}}
  %both-done = (f32[64]{0}, f32[16]{0}) all-gather-done(%both-start)
  %away = (f32[16]{0}, u32[], token[]) send(%x), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %out = f32[16]{0} add(%x, %x)
}
"""  # noqa: E501
FOUR = (0, 1, 2, 3)
PERMUTE = Collective("collective-permute", (0, 1), 64, "send-start")


@pytest.mark.parametrize(
  ("name", "expected"),
  [("gather", [Collective("all-gather", FOUR, 256)]),
   ("scatter", [Collective("reduce-scatter", FOUR, 64)]),
   ("send-start", [PERMUTE]),
   ("async-start", [Collective("all-gather", FOUR, 256, "channel 7")]),
   ("both-start", [Collective("all-gather", FOUR, 256 + 64, "both-start")]),
   ("middle", []), ("async-done", []),
   ("away", [Collective("network", (0, 7), 64, "away")]), ("out", [])],
)  # fmt: skip
def test_the_collectives_of_an_instruction(name, expected):
  module = hlo_module.parse(TEXT)
  assert started(module, module.entry, module.entry.get(name), 8) == expected


@pytest.mark.parametrize(
  ("name", "key"),
  [("send-done", "send-start"), ("async-done", "channel 7"), ("middle", None),
   ("async-start", None), ("scatter", None)],
)  # fmt: skip
def test_the_collective_that_an_instruction_waits_for(name, key):
  module = hlo_module.parse(TEXT)
  assert awaited(module, module.entry.get(name)) == key
