"""Doors to inference engines: one interface, SGLang behind it over HTTP, and a simulated engine that speaks the same wire."""
