"""Every number of a synthetic report is in the table, which is narrow."""

import copy

import pytest

from gspo_jax.plan.derates import Loads
from gspo_jax.plan.table import render

GIB = 2**30
SECONDS = {
  "roofline": 1.25, "collectives": 0.5, "stalled": 0.25,
  "scheduled": 1.5,
}  # fmt: skip
FUNCTION = {
  "compile_seconds": 61.0, "fits": True, "reason": "",
  "buffers": [(3 * GIB, "f32[805306368]")],
  "memory": {
    "arguments": 6 * GIB, "outputs": 6 * GIB, "aliased": 6 * GIB,
    "temporaries": 3 * GIB, "code": 0, "peak": 9 * GIB, "resident": 1 * GIB,
    "needed": 10 * GIB, "free": 30 * GIB,
  },
  "flops": 1.5e15, "attention_flops": 2e14, "padding_flops": 3e14,
  "model_flops": 1e15, "hbm_bytes": 3e12, "seconds": SECONDS,
  "mfu": 0.375,
  "top": [{
    "source": "dot", "seconds": 1, "compiler_seconds": 1.5, "flops": 1e15,
    "hbm_bytes": 2e9,
  }],
  "compiler": {
    "clock": 1.751e9, "share": 0.9,
    "seconds": SECONDS | {"roofline": 2.0, "scheduled": 2.25},
    "mfu": 0.125,
  },
  "unknown_kernels": {"mystery": 7},
}  # fmt: skip
REPORT = {
  "config": "configs/some.py", "topology": "v5p:4x4x4", "slices": 2,
  "devices": 128, "mesh": {"data": 2, "fsdp": 16, "expert": 4, "tensor": 1},
  "sampler_mesh": {"data": 32, "fsdp": 1, "expert": 4, "tensor": 1},
  "jax": "0.10.2", "compiled_by": "libtpu 0.0.51",
  "note": "compiler roofline, nothing ran on a chip",
  "hbm": 40 * GIB,
  "functions": {
    "update": FUNCTION, "old_logps": FUNCTION, "generate": FUNCTION,
  },
  "fits": True,
}  # fmt: skip


def narrow(text):
  """The lines of a table of at most 100 columns, with single spaces."""
  assert max(map(len, text.splitlines())) <= 100
  return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(
  "line",
  ["configs/some.py on 2 x v5p:4x4x4, 128 devices",
   "mesh: data 2, fsdp 16, expert 4; sampler mesh: data 32, expert 4",
   "jax 0.10.2, libtpu 0.0.51; compiler roofline, nothing ran on a chip",
   "peak, by the compiler 9.00 9.00 9.00", "free of 40.00 75% 75% 75%",
   "HBM, GB 3000 3000 3000", "of which not covered 250 ms 250 ms 250 ms",
   "MFU: as scheduled 37.5% 37.5% 37.5%",
   "more, of experts' padding 3.000e+14 3.000e+14 3.000e+14",
   "by libtpu's cycles, 1.75 GHz update old logps generate",
   "operations 2 s 2 s 2 s", "of which it estimates 90% 90% 90%",
   "time: as scheduled 2.25 s 2.25 s 2.25 s",
   "MFU: as scheduled 12.5% 12.5% 12.5%", "dot 1 s 1.5 s 1.00e+15 2",
   "update: 7 x mystery of unknown FLOPs, not counted",
   "verdict: fits, 75% of the HBM free at least"],
)  # fmt: skip
def test_a_line(line):
  assert line in narrow(render(REPORT, top=1))


@pytest.mark.parametrize(
  ("share", "verdict"),
  [(0.07, "verdict: fits, but only 7% of the HBM free: executables and "
    "fragmentation need some"),
   (0.09, "verdict: fits, 9% of the HBM free at least")],
)  # fmt: skip
def test_a_tight_fit_has_a_warning(share, verdict):
  report = copy.deepcopy(REPORT)
  report["functions"]["update"]["memory"]["free"] = share * report["hbm"]
  assert narrow(render(report))[-1] == verdict


def test_it_is_narrow_with_all_functions():
  report = copy.deepcopy(REPORT)
  more = "reference_and_values", "decode_params", "prefill"
  report["functions"] |= dict.fromkeys(more, FUNCTION)
  narrow(render(report, top=1))


DECODE = {
  "steps": 32, "hbm_bytes": 12e9, "least_bytes": 10e9, "ratio": 1.2,
  "least_seconds": 4e-3, "seconds": SECONDS,
}  # fmt: skip
PAGES = {"pages_bytes": 8e9, "pages_seconds": 3e-3}


@pytest.mark.parametrize(
  ("more", "expected"),
  [({}, ["step at the longest cache", "above: the prefill and 32 such steps"]),
   (PAGES | {"kernel": True}, ["step with every page full",
    "of it 8 GB, 3 ms, to read all pages",
    "above: a segment of 32 such steps"]),
   (PAGES | {"kernel": False},
    ["more, not counted: 8 GB, 3 ms, to read all pages"])],
)  # fmt: skip
def test_the_decode_step(more, expected):
  report = copy.deepcopy(REPORT)
  generate = copy.deepcopy(FUNCTION)
  generate["decode"] = DECODE | more
  generate["compiler"]["decode"] = {"seconds": {"scheduled": 2.5}}
  report["functions"]["generate"] = generate
  text = render(report)
  expected = "12 GB, 1.20 times the lower bound, 10 GB", *expected
  for words in ("2.5 s by libtpu's cycles", *expected):
    assert words in text
  narrow(text)


def test_the_largest_pool_can_be_pasted():
  report = copy.deepcopy(REPORT)
  report["functions"]["generate"]["pages"] = {
    "num_pages": 384000, "largest": 391680, "slots_of_longest": 2816,
    "tokens_a_slot": 6120, "margin": 0.08, "state_bytes": 3e9,
  }  # fmt: skip
  text = render(report)
  for words in (
    "generate: the HBM holds continuous_batching.num_pages=391680, with 8% of",
    "384000 are asked for; the most are 6120 tokens a slot",
    "continuous_batching.slots=2816",
    "the states of all slots take 3 GB of each device",
  ):
    assert words in text
  narrow(text)


def test_a_misfit_is_named_last_with_its_buffers():
  report = copy.deepcopy(REPORT)
  report["functions"]["old_logps"] = {
    "compile_seconds": 3.0,
    "fits": False,
    "reason": "RESOURCE_EXHAUSTED: too much",
    "buffers": [(50 * GIB, "f32[64,4096,151936]" + "x" * 200)],
  }
  text = render(report)
  assert text.endswith("verdict: does NOT fit: old_logps")
  assert "old_logps does not fit: RESOURCE_EXHAUSTED: too much" in text
  assert "50.00  f32[64,4096,151936]" in text
  narrow(text)


ITERATION = {
  "continues": True,
  "prompts": {
    "count": 512, "tokens": 262144, "mean": 512.0, "median": 512.0,
    "longest": 1023,
  },
  "responses": {
    "count": 8192, "tokens": 31457280, "mean": 3840.25, "median": 2400.0,
    "longest": 15360,
  },
  "decoding": {"by_rows": {2048: (20480, 0, 0), 1024: (7, 0, 0)}},
  "learning": {"update": {"micro_batches": 43, "real": 9, "computed": 10}},
  "seconds_of": {"steps": 84.0, "update": 227.0},
  "seconds": 498.0, "mfu": 0.28125,
  "tokens_per_second_per_chip": 987.0, "with_prompts_per_chip": 1020.0,
  "compiler": {
    "seconds_of": {"steps": 124.0, "update": 257.0},
    "seconds": 602.0, "mfu": 0.21875,
    "tokens_per_second_per_chip": 816.0, "with_prompts_per_chip": 844.0,
  },
  "expected": {
    "seconds_of": {"steps": 144.0, "update": 277.0, "host": 2.0},
    "seconds": 652.0, "mfu": 0.1875,
    "tokens_per_second_per_chip": 716.0, "with_prompts_per_chip": 744.0,
    "added": {"hbm": {"steps": 20.0, "reading": 5.0}, "host": {"host": 2.0}},
    "loads": (Loads(1.125, 0.25), {2048: Loads(1.5, 0.5), 1024: Loads()}),
    "evaluation": 21.0, "checkpoint": 0.25,
  },
}  # fmt: skip


@pytest.mark.parametrize(
  "line",
  ["iteration, lognormal:mean=.25,sigma=1",
   "512 prompts: 262144 tokens, mean 512, median 512, longest 1023",
   "8192 responses: 31457280 tokens, mean 3840, median 2400, longest 15360",
   "responses that continue in later iterations are counted as if each ended "
    "in this one",
   "an iteration at best by libtpu expected",
   "steps 84 s 124 s 144 s", "update 227 s 257 s 277 s", "host 0 us 0 us 2 s",
   "all 498 s 602 s 652 s", "useful MFU 28.1% 21.9% 18.8%",
   "sampled tokens/s a chip 987 816 716", "with prompts 1020 844 744",
   "expected adds hbm 25 s, host 2 s",
   "1.50 times the mean load; a second chunk in 25% and 50% of layers",
   "beside it, an iteration's share: evaluation 21 s, checkpoint 250 ms",
   "decode steps by their rows: 20480 of 2048, 7 of 1024",
   "43 micro-batches in the update; of their tokens 90.0% are real"],
)  # fmt: skip
def test_an_iteration(line):
  report = REPORT | {"lengths": "lognormal:mean=.25,sigma=1"}
  assert line in narrow(render(report | {"iteration": ITERATION}))


def test_without_cycles_an_iteration_has_two_estimates():
  report = REPORT | {
    "lengths": "x",
    "iteration": ITERATION | {"compiler": None},
  }
  assert "steps 84 s 144 s" in narrow(render(report))


def test_a_run_beside_its_plan():
  seconds = {"generate": (300.0, 250.0), "score": (3.0, 4.0)}
  derates = {"hbm": 0.75, "kernels": None, "host": 2.5e-4}
  measured = {"iterations": 9, "seconds": seconds, "derates": derates}
  lines = narrow(render(REPORT | {"measured": measured}))
  assert "measured, 9 iterations measured expected ratio" in lines
  assert "generate 300 s 250 s 1.20" in lines
  assert "score 3 s 4 s 0.75" in lines
  assert (
    "they would be equal with hbm 0.75, kernels none, host 0.00025" in lines
  )


def test_an_iteration_of_what_does_not_compile():
  text = render(REPORT | {"lengths": "some.txt", "iteration": None})
  assert "iteration, some.txt: not costed, as not all of it compiles" in text
