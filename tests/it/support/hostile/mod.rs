//! The properties that must hold for any input from outside. The rules name nothing but the library, so that a fuzzer that
//! is guided by coverage can be given them as they are.

use axed::config::environment::process_environment;
use proptest::test_runner::{Config, RngSeed};

pub mod files;
pub mod wires;

/// This many cases, always the same ones. `PROPTEST_CASES` sets another number, with other cases each time.
pub fn proptest_config(default_cases: u32) -> Config {
    let default_config = Config {
        cases: default_cases,
        rng_seed: RngSeed::Fixed(0x0a_5e_ed),
        ..Config::default()
    };
    let base = match process_environment().contains_key("PROPTEST_CASES") {
        true => Config::default(),
        false => default_config,
    };
    Config {
        // A case that failed becomes a test with a name.
        failure_persistence: None,
        ..base
    }
}
