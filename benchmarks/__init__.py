"""Speed and memory as ratios against a peer or a limit measured in the same run. `python -m benchmarks [name ...]`."""
