"""Renders the report of a plan as text of at most 100 columns."""

import math

from gspo_jax.plan.memory import KEY, MARGIN

_GIB = 2**30
_WIDTH = 100
# Short heads for function names that are wider than a column.
_HEADS = {
  "old_logps": "old logps",
  "reference_and_values": "ref+values",
  "decode_params": "weights",
}


def render(report: dict, *, top: int = 0) -> str:
  """The tables of a plan's report; `top` operations are listed."""
  functions = report["functions"]
  parts = [_heading(report), _memory(report)]
  costed = {k: f for k, f in functions.items() if "seconds" in f}
  if costed:
    parts.append(_costs(costed))
  for name, f in costed.items():
    if "decode" in f:
      parts.append(_decode(f["decode"], f["compiler"]))
    if top:
      parts.append(_top(name, f["top"][:top], bool(f["compiler"])))
    for kernel, count in f["unknown_kernels"].items():
      parts.append(
        f"{name}: {count:g} x {kernel} of unknown FLOPs, not counted"
      )
  if room := functions.get("generate", {}).get("pages"):
    parts.append(_room(room))
  if "lengths" in report:
    parts.append(_iteration(report))
  if "measured" in report:
    parts.append(_measured(report["measured"]))
  parts += [_unfit(k, f) for k, f in functions.items() if not f["fits"]]
  parts.append(_verdict(report))
  return "\n\n".join(parts)


def _heading(report):
  mesh = lambda m: ", ".join(f"{k} {v}" for k, v in m.items() if v > 1) or "1"
  slices = f"{report['slices']} x " if report["slices"] > 1 else ""
  split = ""
  if transfer := report.get("transfer"):
    sample = math.prod(report["sampler_mesh"].values())
    split = (
      f", of which {sample} sample; each is sent "
      f"{transfer['bytes_per_device'] / _GIB:.2f} GiB of weights, in "
      f"{_time(transfer['seconds'])} at best"
    )
  return (
    f"{report['config']} on {slices}{report['topology']}, "
    f"{report['devices']} devices{split}\n"
    f"mesh: {mesh(report['mesh'])}; sampler mesh: "
    f"{mesh(report['sampler_mesh'])}\n"
    f"jax {report['jax']}, {report['compiled_by']}; {report['note']}"
  )


def _table(title, functions, rows):
  width = min(14, (_WIDTH - 30) // len(functions))
  line = lambda label, cells: (
    f"{label:30}" + "".join(f"{cell:>{width}}" for cell in cells)
  )
  lines = [line(title, [_HEADS.get(name, name) for name in functions])]
  for label, value in rows:
    lines.append(line(f"  {label}", [value(f) for f in functions.values()]))
  return "\n".join(lines)


def _memory(report):
  cell = lambda key, unit, spec: (
    lambda f: f"{f['memory'][key] / unit:{spec}}" if "memory" in f else "-"
  )
  rows = [
    (label, cell(label.split(",")[0], _GIB, ".2f"))
    for label in ("arguments", "outputs", "aliased", "temporaries", "code",
                  "peak, by the compiler", "resident, state not read",
                  "needed")
  ]  # fmt: skip
  rows += [
    (f"free of {report['hbm'] / _GIB:.2f}", cell("free", report["hbm"], ".0%")),
    ("fits", lambda f: "yes" if f["fits"] else "NO"),
    ("compiled in", lambda f: f"{f['compile_seconds']:.0f} s"),
  ]
  return _table("HBM a device, GiB", report["functions"], rows)


def _costs(functions):
  flops = lambda key: lambda f: f"{f[key]:.3e}"
  seconds = lambda key: lambda f: _time(f["seconds"][key])
  whole = (
    ("time: as scheduled", seconds("scheduled")),
    ("MFU: as scheduled", lambda f: f"{f['mfu']:.1%}"),
  )
  rows = (
    ("FLOPs", flops("flops")),
    ("of which attention kernels", flops("attention_flops")),
    ("more, of experts' padding", flops("padding_flops")),
    ("model FLOPs", flops("model_flops")),
    ("HBM, GB", lambda f: _gb(f["hbm_bytes"])),
    ("roofline of operations", seconds("roofline")),
    ("collectives", seconds("collectives")),
    ("of which not covered", seconds("stalled")),
  )
  work = _table("work a device and call", functions, (*rows, *whole))
  compiler = {name: f["compiler"] for name, f in functions.items()}
  if None in compiler.values():
    return f"{work}\nby the compiler's cycles: it states none for a GPU"
  clock = next(iter(compiler.values()))["clock"] / 1e9
  rows = (
    ("operations", seconds("roofline")),
    ("of which it estimates", lambda f: f"{f['share']:.0%}"),
  )
  title = f"by libtpu's cycles, {clock:.2f} GHz"
  return f"{work}\n{_table(title, compiler, (*rows, *whole))}"


def _decode(d, by_compiler):
  paged = "pages_bytes" in d
  cache = "with every page full" if paged else "at the longest cache"
  lines = [
    f"generate: one decode step {cache}, a device",
    f"  HBM {_gb(d['hbm_bytes'])} GB, {d['ratio']:.2f} times the lower bound, "
    f"{_gb(d['least_bytes'])} GB (used weights and cache, once)",
    f"  {_time(d['seconds']['scheduled'])} as scheduled: roofline "
    f"{_time(d['seconds']['roofline'])}, collectives "
    f"{_time(d['seconds']['collectives'])}; lower bound "
    f"{_time(d['least_seconds'])}",
  ]
  if by_compiler:
    seconds = by_compiler["decode"]["seconds"]["scheduled"]
    lines.append(f"  {_time(seconds)} by libtpu's cycles")
  if paged:
    counted = "of it" if d["kernel"] else "more, not counted:"
    lines.append(
      f"  {counted} {_gb(d['pages_bytes'])} GB, {_time(d['pages_seconds'])}, "
      "to read all pages"
    )
  above = "a segment of" if paged else "the prefill and"
  return "\n".join([*lines, f"  above: {above} {d['steps']} such steps"])


def _room(room):
  states = ""
  if size := room["state_bytes"]:
    states = f"\n  the states of all slots take {_gb(size)} GB of each device"
  return (
    f"generate: the HBM holds {KEY}={room['largest']}, with "
    f"{room['margin']:.0%} of it left free\n"
    f"  {room['num_pages']} are asked for; the most are "
    f"{room['tokens_a_slot']} tokens a slot, or the longest responses of\n"
    f"  continuous_batching.slots={room['slots_of_longest']}" + states
  )


def _iteration(report):
  i = report["iteration"]
  if i is None:
    return (
      f"iteration, {report['lengths']}: not costed, as not all of it compiles"
    )
  lines = [f"iteration, {report['lengths']}"]
  for kind in ("prompts", "responses"):
    n = i[kind]
    lines.append(
      f"  {n['count']} {kind}: {n['tokens']} tokens, mean {n['mean']:.0f}, "
      f"median {n['median']:.0f}, longest {n['longest']}"
    )
  if i["continues"]:
    lines.append(
      "  responses that continue in later iterations are counted as if each "
      "ended in this one"
    )
  lines += [*_estimates(i, report.get("transfer")), *_expected(i["expected"])]
  decoding, update = i["decoding"], i["learning"]["update"]
  rows = (f"{sums[0]} of {n}" for n, sums in decoding["by_rows"].items())
  lines += [
    f"  decode steps by their rows: {', '.join(rows)}",
    f"  {update['micro_batches']} micro-batches in the update; of their tokens "
    f"{update['real'] / update['computed']:.1%} are real",
  ]
  return "\n".join(lines)


def _estimates(i, transfer):
  """The parts of an iteration, each by three estimates."""
  by = {"at best": i, "by libtpu": i["compiler"], "expected": i["expected"]}
  by = {name: estimate for name, estimate in by.items() if estimate}
  row = lambda label, cells: (
    f"  {label:28}" + "".join(f"{cell:>14}" for cell in cells)
  )
  lines = [row("an iteration", by)]
  for part in i["expected"]["seconds_of"]:
    seconds = (e["seconds_of"].get(part, 0) for e in by.values())
    lines.append(row(part, map(_time, seconds)))
  if transfer:
    lines.append(row("transfer", [_time(transfer["seconds"])] * len(by)))
  for label, key, cell in (
    ("all", "seconds", _time),
    ("useful MFU", "mfu", "{:.1%}".format),
    ("sampled tokens/s a chip", "tokens_per_second_per_chip", "{:.0f}".format),
    ("with prompts", "with_prompts_per_chip", "{:.0f}".format),
  ):
    lines.append(row(label, [cell(e[key]) for e in by.values()]))
  return lines


def _expected(e):
  added = {name: sum(parts.values()) for name, parts in e["added"].items()}
  learner, sampler = e["loads"]
  one, step = learner, sampler[max(sampler)]
  return [
    f"  expected adds {_times(added)}",
    "  experts of the busiest device, in the update and in a decode step: "
    f"{one.busiest:.2f} and",
    f"    {step.busiest:.2f} times the mean load; a second chunk in "
    f"{one.second:.0%} and {step.second:.0%} of layers",
    f"  beside it, an iteration's share: evaluation {_time(e['evaluation'])}, "
    f"checkpoint {_time(e['checkpoint'])}",
  ]


def _measured(m):
  lines = [
    f"{'measured, ' + str(m['iterations']) + ' iterations':26}{'measured':>14}"
    f"{'expected':>14}{'ratio':>9}"
  ]
  for part, (seconds, expected) in m["seconds"].items():
    lines.append(
      f"  {part:24}{_time(seconds):>14}{_time(expected):>14}"
      f"{seconds / expected:>9.2f}"
    )
  derates = ", ".join(
    f"{name} {'none' if value is None else f'{value:.3g}'}"
    for name, value in m["derates"].items()
  )
  return "\n".join([*lines, f"  they would be equal with {derates}"])


def _top(name, operations, estimated):
  by_libtpu = lambda cell: f"{cell:>14}" if estimated else ""
  lines = [
    f"{name + ': most expensive operations':46}{'time':>14}"
    f"{by_libtpu('by libtpu')}{'FLOPs':>11}{'HBM, GB':>11}"
  ]
  for t in operations:
    lines.append(
      f"  {_tail(t['source'], 44):44}{_time(t['seconds']):>14}"
      f"{by_libtpu(_time(t['compiler_seconds']))}"
      f"{t['flops']:>11.2e}{_gb(t['hbm_bytes']):>11}"
    )
  return "\n".join(lines)


def _unfit(name, f):
  buffers = (
    f"  {size / _GIB:>9.2f}  {shapes[: _WIDTH - 13]}"
    for size, shapes in f["buffers"]
  )
  first = f"{name} does not fit: {f['reason']}"
  return "\n".join([first, "  largest buffers, GiB:", *buffers])


def _verdict(report):
  bad = [k for k, f in report["functions"].items() if not f["fits"]]
  if bad:
    return f"verdict: does NOT fit: {', '.join(bad)}"
  free = min(f["memory"]["free"] for f in report["functions"].values())
  share = free / report["hbm"]
  if share < MARGIN:  # it may not run, although it fits
    return (
      f"verdict: fits, but only {share:.0%} of the HBM free: executables and "
      "fragmentation need some"
    )
  return f"verdict: fits, {share:.0%} of the HBM free at least"


def _gb(size):
  return f"{size / 1e9:.4g}"


def _time(seconds):
  for unit, name in ((1, "s"), (1e-3, "ms")):
    if seconds >= unit:
      return f"{seconds / unit:.3g} {name}"
  return f"{seconds * 1e6:.3g} us"


def _times(seconds) -> str:
  return ", ".join(f"{name} {_time(s)}" for name, s in seconds.items())


def _tail(text, width):
  return text if len(text) <= width else "..." + text[3 - width :]
