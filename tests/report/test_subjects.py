"""Every metric has one place."""

from gspo_jax.report.subjects import SUBJECTS, matched


def test_no_name_is_left_over_and_none_is_shown_twice():
  names = {"eval/pass@1", "moe/new_thing", "reward/mean", "odd", "x/y/z"}
  taken, shown = set(), []
  for subject in SUBJECTS:
    for chart in subject.charts:
      here = matched(chart.metrics, names, taken)
      shown += here
      taken |= set(here)
  assert sorted(shown) == sorted(names)


def test_labels_are_short_and_in_order_of_number():
  names = [f"eval/pass@{k}" for k in (16, 2, 8)]
  labels = matched({"eval/pass@*": ""}, names, set())
  assert list(labels.values()) == ["pass@2", "pass@8", "pass@16"]
  (label,) = matched({"*": ""}, ["moe/a_very_long_name_of_it"], set()).values()
  assert label == "a very long nam…"
