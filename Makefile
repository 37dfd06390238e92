# Every command of the project. Each target is one line of help and, where it is more than a
# command or two, a script that can be read and run by itself.

.DEFAULT_GOAL := help
# `bench`, `fuzz` and `docs` are folders too: without this line make would call them up to date.
.PHONY: help test lint bench fuzz soak deny docs dist

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## run every test; fail if one failed, was skipped or went missing
	@tools/test

lint: ## check formatting and clippy, warnings denied; BENCH=1 runs clippy on bench/ and fuzz/ too
	cargo fmt --all --check
	cargo fmt --all --check --manifest-path bench/Cargo.toml
	cargo fmt --all --check --manifest-path fuzz/Cargo.toml
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
# Each feature alone: none may depend on another by accident.
	for feature in "" config redis; do \
		cargo check --quiet --locked -p tollkeeper --no-default-features --features "$$feature" || exit 1; done
	for feature in "" axum tonic config redis nfkc; do \
		cargo check --quiet --locked -p tollkeeper-tower --no-default-features --features "$$feature" || exit 1; done
# The separate workspaces have their own lock files.
	for own in bench fuzz; do cargo update --quiet --workspace --locked --manifest-path $$own/Cargo.toml || exit 1; done
# Only on request, because it builds every peer that the benchmarks compare with.
ifeq ($(BENCH),1)
	cargo clippy --manifest-path bench/Cargo.toml --all-targets --all-features --locked -- -D warnings
	cargo clippy --manifest-path fuzz/Cargo.toml --all-targets --all-features --locked -- -D warnings
endif

bench: ## measure against the peers
	@bench/run

fuzz: ## run the fuzz targets
	@fuzz/run

soak: ## run the property tests with many more cases (CASES=200000), longer faults (SECONDS_EACH=20), more requests (EXAMPLES=500)
	@tools/soak

deny: ## check bans, licences and sources of all dependencies (deny.toml)
	@cargo deny --version >/dev/null 2>&1 || { \
		echo "deny: cargo-deny is missing: installing it, which takes a few minutes"; \
		cargo install --locked cargo-deny; }
	cargo deny check bans licenses sources

docs: ## build the API documentation in target/doc; a broken link is an error
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --locked

dist: ## build a static tarball and a Debian package in target/dist
	@tools/dist
