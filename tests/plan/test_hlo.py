"""The parser: names, types and attributes of handwritten HLO."""

import pytest

from gspo_jax.plan.hlo import module as hlo_module

TEXT = """\
HloModule jit_f, is_scheduled=true

FileNames
1 "f.py"

%inner (a: bf16[8,128]) -> (bf16[8,128], s32[]) {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %n = s32[]{:T(128)} constant(-7)
  ROOT %pair = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s32[]) tuple(%a, %n)
}, execution_thread="sparsecore"

ENTRY %main.1 (x: bf16[8,128], y: f32[3]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x"}
  %y = f32[3]{0} parameter(1)
  %kernel.2 = (bf16[8,128]{1,0}, f32[3]{0:S(5)}) custom-call(%x, %y), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel" stack_frame_id=1}
  %call-start = ((bf16[8,128]), (bf16[8,128], s32[]), u32[]{:S(2)}) async-start(%x), calls=%inner
  ROOT %get-tuple-element.3 = bf16[8,128]{1,0} get-tuple-element(%kernel.2), index=0
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def module():
  return hlo_module.parse(TEXT)


def test_computations_operands_and_uses(module):
  assert set(module.computations) == {"inner", "main.1"}
  assert module.entry is module["main.1"]
  assert module.entry.root.name == "get-tuple-element.3"
  assert module.entry.root.index == 0
  assert [p.name for p in module.entry.parameters.values()] == ["x", "y"]
  kernel = module.entry.get("kernel.2")
  assert (kernel.op, kernel.operands) == ("custom-call", ("x", "y"))
  users = [(i.name, at) for i, at in module.entry.uses["x"]]
  assert users == [("kernel.2", 0), ("call-start", 0)]
  # A line break in attributes belongs to the instruction.
  assert kernel.source == "jit(f)/kernel"
  assert module.entry.get("y").source == "y"


def test_only_arrays_in_hbm_count_as_hbm_bytes(module):
  kernel = module.entry.get("kernel.2")
  assert kernel.bytes == 8 * 128 * 2 + 3 * 4
  assert kernel.hbm_bytes == 8 * 128 * 2
  assert module["inner"].get("a").hbm_bytes == 0
  assert module["inner"].root.bytes == 8 * 128 * 2 + 4


@pytest.mark.parametrize(
  ("text", "size"),
  [("pred[10]{0}", 10), ("s4[10]", 5), ("f8e4m3fn[2,3]", 6), ("bf16[]", 2),
   ("f64[0,7]", 0), ("token[]", 0), ("((f32[2], u32[]), s8[1]{0:S(3)})", 13)],
)  # fmt: skip
def test_bytes_of_types(text, size):
  assert sum(a.bytes for a in hlo_module.arrays(text)) == size


def test_called_computations(module):
  assert module.entry.get("call-start").called("calls") == ("inner",)
  assert module.entry.get("x").called("calls") == ()
  several = hlo_module.arrays("s32[]"), ("p",), "%p"
  branch = hlo_module.Instruction(
    "c", "conditional", *several, "branch_computations={%a.1, %b}", False
  )
  assert branch.called("branch_computations") == ("a.1", "b")


@pytest.mark.parametrize(
  ("text", "words"),
  [("", "no ENTRY"),
   ("ENTRY %m () -> s32[] {\n  %x = nonsense\n}", "not an HLO instruction")],
)  # fmt: skip
def test_text_that_is_not_hlo_is_an_error(text, words):
  with pytest.raises(ValueError, match=words):
    hlo_module.parse(text)
