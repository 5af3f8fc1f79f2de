"""Declarative rules: *when* a metric of a run passes a threshold for some periods, *then* turn knobs, *until* it passes another.

`rule.py` is what a rule says, `metrics.py` what it may look at, `book.py` when it fires and ends, `knobs.py` what firing rules
come to together, `watch.py` all of it over a `World`.
"""
