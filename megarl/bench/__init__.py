"""Benchmarks: ratios measured side by side in one run (`megarl bench`)."""
