# What README.md promises; `make` lists it. Everything is installed into .venv of this checkout.
#   PYTHON  the interpreter .venv is made with: 3.11 or newer
#   TORCH   what the demo and its tests install as torch; see deploy/install.sh
PYTHON ?= python3
TORCH ?=
PY := .venv/bin/python
export PYTHON TORCH

.PHONY: help demo run certs test check format lint types imports drift bench fuzz simulate proto clean

help:
	@echo "make demo    a real model through the pool: installs, starts Master and node client, shows every request"
	@echo "make run     a Master and a node client in the foreground; Ctrl-C stops both"
	@echo "make certs   a CA for tests, certificates and tokens in ./certs (CERTS_FLAGS=--help)"
	@echo "make test    the whole test suite"
	@echo "make check   format, lint, types, import rules, stub drift, then the tests"
	@echo "make bench   the figures of docs/benchmarks.md, as a table and as bench.json"
	@echo "make simulate  whole pools in trouble, each from a seed (SEEDS=1000 FIRST=1, or SEED=17 to replay one)"
	@echo "make fuzz    the core against the naive model, longer than the tests do (KVPOOL_FUZZ_EXAMPLES=2000)"

demo:
	@sh deploy/install.sh demo
	@$(PY) deploy/demo/run.py $(DEMO_FLAGS)

run:
	@sh deploy/install.sh run
	@$(PY) deploy/run.py

certs:
	@sh deploy/install.sh run
	@$(PY) deploy/certs.py $(CERTS_FLAGS)

test:
	@sh deploy/install.sh dev demo
	@$(PY) -m pytest $(PYTEST_FLAGS)

check: format lint types imports drift test

format: .dev
	$(PY) -m ruff format --check .

lint: .dev
	$(PY) -m ruff check .

types: .dev
	$(PY) -m pyright

imports: .dev
	.venv/bin/lint-imports --no-cache

.PHONY: .dev
.dev:
	@sh deploy/install.sh dev demo

# The generator has a .venv of its own: the oldest we support, which the daemons need not run on.
PROTOC = .venv-proto/bin/python -m grpc_tools.protoc -I proto \
	--plugin=protoc-gen-mypy=.venv-proto/bin/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=.venv-proto/bin/protoc-gen-mypy_grpc
STUBS = pool_pb2.py pool_pb2.pyi pool_pb2_grpc.py pool_pb2_grpc.pyi

.venv-proto/bin/protoc-gen-mypy:
	@sh deploy/install.sh proto

define generate
	$(PROTOC) --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
		proto/kvpool_proto/pool.proto
endef

proto: .venv-proto/bin/protoc-gen-mypy
	$(call generate,proto)

drift: .venv-proto/bin/protoc-gen-mypy
	@rm -rf .cache/stubs && mkdir -p .cache/stubs
	$(call generate,.cache/stubs)
	@for stub in $(STUBS); do cmp proto/kvpool_proto/$$stub .cache/stubs/kvpool_proto/$$stub \
		|| { echo "stale stub: run 'make proto' and commit"; exit 1; }; done

bench: .dev
	@$(PY) tests/bench/run.py --json bench.json

fuzz: .dev
	KVPOOL_FUZZ_EXAMPLES=$${KVPOOL_FUZZ_EXAMPLES:-2000} $(PY) -m pytest tests/property --timeout 0

simulate: .dev
	cd tests && PYTHONHASHSEED=0 ../$(PY) -m simulation $(if $(SEED),--seed $(SEED) -v,--seeds $(or $(SEEDS),200) --first $(or $(FIRST),1) --jobs 2)

clean:
	rm -rf .venv .venv-proto .cache .pytest_cache .ruff_cache .hypothesis bench.json
