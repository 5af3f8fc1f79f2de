"""Workloads, the bounds they are held against, and the report of what happened.

One file per noun: `lengths` and `workload` describe, `traffic` and `w1` draw, `bounds` and `ceiling` say what no
scheduler can beat, `metrics` and `report` say what one scheduler did. All of it is pure and deterministic by seed.
"""
