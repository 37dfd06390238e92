# Every command of the project. A target has one line of help and, if it needs more than a command or two, a script that can
# also be run on its own.

.DEFAULT_GOAL := help
# `bench`, `fuzz` and `docs` are also folders: without this line make would consider them up to date.
.PHONY: help quick test lint bench fuzz soak deny docs dist clients

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# `config` and `redis` without what needs other programs: no test here starts a server, and the tests of the JSON schema, which
# need a validator from PyPI, run in `make test`.
quick: ## run the tests of the core and the library: about two minutes, installs nothing
	cargo test --locked -p tollkeeper-core -p tollkeeper --features tollkeeper/config,tollkeeper/redis -- --skip schema::

test: ## run every test; fail if one failed, was skipped or went missing
	@tools/test

lint: ## check formatting and clippy, warnings are errors; BENCH=1 includes bench/, fuzz/ and clients/
	cargo fmt --all --check
	cargo fmt --all --check --manifest-path bench/Cargo.toml
	cargo fmt --all --check --manifest-path fuzz/Cargo.toml
	cargo fmt --all --check --manifest-path clients/Cargo.toml
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
# Each feature on its own: it must not rely on dependencies of another feature.
	for feature in "" config redis test-kit; do \
		cargo check --quiet --locked -p tollkeeper --no-default-features --features "$$feature" || exit 1; done
	for feature in "" axum tonic config redis nfkc; do \
		cargo check --quiet --locked -p tollkeeper-tower --no-default-features --features "$$feature" || exit 1; done
# bench/, fuzz/ and clients/ have lock files of their own.
	for own in bench fuzz clients; do cargo update --quiet --workspace --locked --manifest-path $$own/Cargo.toml || exit 1; done
# Only on request, because it builds every peer of the benchmarks.
ifeq ($(BENCH),1)
	cargo clippy --manifest-path bench/Cargo.toml --all-targets --all-features --locked -- -D warnings
	cargo clippy --manifest-path fuzz/Cargo.toml --all-targets --all-features --locked -- -D warnings
	cargo clippy --manifest-path clients/Cargo.toml --all-targets --all-features --locked -- -D warnings
endif

bench: ## measure, and compare with other limiters
	@bench/run

fuzz: ## run the fuzz targets
	@fuzz/run

soak: ## run the property tests with many more cases (CASES=200000), longer faults (SECONDS_EACH=20), more requests (EXAMPLES=500), simulations (SEEDS=1000000)
	@tools/soak

deny: ## check licences, sources and banned crates of all dependencies (deny.toml)
	@cargo deny --version >/dev/null 2>&1 || { \
		echo "deny: cargo-deny is missing: installing it, which takes a few minutes"; \
		cargo install --locked cargo-deny; }
	cargo deny check bans licenses sources

docs: ## build the API documentation in target/doc; a broken link is an error
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --locked

dist: ## build a static tarball and a Debian package in target/dist
	@tools/dist

clients: ## build the packages for Node and Python in target/clients
	@tools/clients
