"""Every number of a synthetic report is in the table, which is narrow."""

import copy

import pytest

from gspo_jax.plan.table import render

GIB = 2**30
SECONDS = {
  "roofline": 1.25, "collectives": 0.5, "stalled": 0.25,
  "scheduled": 1.5,
}  # fmt: skip
COLLECTIVE = {
  "kind": "all-gather", "group": 16, "asynchronous": True, "count": 96,
  "wire": 2.5e9, "seconds": 0.5,
}  # fmt: skip
FUNCTION = {
  "compile_seconds": 61.0, "fits": True, "reason": "",
  "buffers": [(3 * GIB, "f32[805306368]")],
  "memory": {
    "arguments": 6 * GIB, "outputs": 6 * GIB, "aliased": 6 * GIB,
    "temporaries": 3 * GIB, "code": 0, "peak": 9 * GIB, "resident": 1 * GIB,
    "needed": 10 * GIB, "free": 30 * GIB,
  },
  "loops": [{"source": "experts/while", "times": 4, "seconds": 3e-6}],
  "branches": [{"source": "x" * 99, "times": 48, "seconds": 5}],
  "flops": 1.5e15, "attention_flops": 2e14, "padding_flops": 3e14,
  "model_flops": 1e15, "hbm_bytes": 3e12, "seconds": SECONDS,
  "mfu": 0.375,
  "collectives": [COLLECTIVE],
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
   "all-gather, asynchronous 16 96 2.5 500 ms",
   "more, of experts' padding 3.000e+14 3.000e+14 3.000e+14",
   "by libtpu's cycles, 1.75 GHz update old logps generate",
   "operations 2 s 2 s 2 s", "of which it estimates 90% 90% 90%",
   "time: as scheduled 2.25 s 2.25 s 2.25 s",
   "MFU: as scheduled 12.5% 12.5% 12.5%", "dot 1 s 1.5 s 1.00e+15 2",
   "experts/while 4 x 3 us, counted once",
   f"...{'x' * 45} 48 x 5 s, not counted",
   "7 x kernel mystery of unknown FLOPs, not counted",
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
    "8 GB, 3 ms of it to read all pages; less if fewer are full",
    "above: a segment of 32 such steps"]),
   (PAGES | {"kernel": False},
    ["not counted: 8 GB, 3 ms to read all pages in blocks"])],
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
  "parts": {
    "generate": {
      "seconds": 185.0, "real_tokens": 31457280, "computed_tokens": 62914560,
      "useful_fraction": 0.5, "mfu": 0.0125, "steps": 20480, "segments": 640,
      "slots": 2048, "slots_in_use": [1.0] * 9 + [0.125],
      "seconds_of": {
        "prefill": 1.0, "steps": 84.0, "reading": 60.0, "waiting": 40.0,
      },
    },
    "weights": {"seconds": 0.056},
    "score": {
      "seconds": 86.0, "real_tokens": 8, "computed_tokens": 10,
      "useful_fraction": 0.8, "mfu": 0.375,
    },
    "update": {
      "seconds": 227.0, "real_tokens": 9, "computed_tokens": 10,
      "useful_fraction": 0.9, "mfu": 0.4375, "micro_batches": 43,
      "micro_batch_seconds": 5.25, "optimizer_step_seconds": 0.035,
    },
  },
  "seconds": 498.0,
  "real_tokens": 31457297,
  "computed_tokens": 62914580,
  "useful_fraction": 0.5,
  "mfu": 0.28125,
  "tokens_per_second": 63166.0, "tokens_per_second_per_chip": 987.0,
  "with_prompts_per_chip": 1020.0,
  "compiler": {
    "seconds": 602.0, "mfu": 0.21875, "parts": {"generate": 202.0},
    "tokens_per_second": 52254.0, "tokens_per_second_per_chip": 816.0,
    "with_prompts_per_chip": 844.0,
  },
}  # fmt: skip


@pytest.mark.parametrize(
  "line",
  ["iteration, lognormal:mean=.25,sigma=1",
   "512 prompts: 262144 tokens, mean 512, median 512, longest 1023",
   "8192 responses: 31457280 tokens, mean 3840, median 2400, longest 15360",
   "responses that continue in later iterations are counted as if each ended "
    "in this one",
   "time real tokens computed useful useful MFU",
   "generate 185 s 31457280 62914560 50.0% 1.2%", "weights 56 ms",
   "score 86 s 8 10 80.0% 37.5%", "update 227 s 9 10 90.0% 43.8%",
   "all 498 s 31457297 62914580 50.0% 28.1%",
   "by libtpu's cycles 602 s, useful MFU 21.9%: generate 202 s",
   "at best: 63166 sampled tokens/s, 987 a chip; with prompts 1020 a chip",
   "by libtpu's cycles: 52254 sampled tokens/s, 816 a chip; with prompts 844 "
    "a chip",
   "generate: prefill 1 s, steps 84 s, reading 60 s, waiting 40 s",
   "20480 decode steps in 640 segments; of 2048 slots in use, by tenths:",
   "100% 100% 100% 100% 100% 100% 100% 100% 100% 12%",
   "43 micro-batches of 5.25 s in the update, and 35 ms an optimizer step"],
)  # fmt: skip
def test_an_iteration(line):
  report = REPORT | {"lengths": "lognormal:mean=.25,sigma=1"}
  assert line in narrow(render(report | {"iteration": ITERATION}))


def test_an_iteration_of_what_does_not_compile():
  text = render(REPORT | {"lengths": "some.txt", "iteration": None})
  assert "iteration, some.txt: not costed, as not all of it compiles" in text
