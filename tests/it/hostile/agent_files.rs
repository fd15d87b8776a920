//! Agent files and configurations that were mutilated. The rules for agent files are in `support/hostile/files.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use axed::config::load::{Flags, load};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::support::hostile::files::check_agent;
use crate::support::hostile::proptest_config;

proptest! {
    #![proptest_config(proptest_config(256))]

    #[test]
    fn any_agent_file_is_a_definition_or_a_located_error((_, text) in mutilated(agents())) {
        let _ = check_agent(text.as_bytes());
    }

    #[test]
    fn random_bytes_are_not_an_agent(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = check_agent(&bytes);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line(
        (text, line) in select(agents()).prop_flat_map(|text| {
            let lines = text.lines().count();
            (Just(text), 0..lines)
        }),
        key in "zz[a-z]{1,8}",
    ) {
        let broken = with_line(&text, line, &format!("{key} = 1"));
        // In the middle of a text it is text, and in a schema whatever a schema says of it.
        if let Err(error) = check_agent(broken.as_bytes()) {
            let reported = error.to_string();
            prop_assert!(reported.contains(&key) || reported.contains("is no JSON Schema"), "{reported}");
        }
        let reported = check_agent(with_line(&text, 0, &format!("{key} = 1")).as_bytes());
        let reported = reported.expect_err("an unknown key").to_string();
        prop_assert!(reported.contains(&format!("agents/some.toml:1:1: unknown key \"{key}\"")), "{reported}");
    }

    #[test]
    fn any_configuration_is_read_or_rejected_with_its_file((is_whole, text) in mutilated(vec![config()])) {
        let reported = configured(text.as_bytes());
        prop_assert_eq!(&reported, &configured(text.as_bytes()));
        match reported {
            Ok(_) => {}
            Err(reported) => {
                prop_assert!(!is_whole, "{}", reported);
                // A [[list]] instead of a table is an error of its own section; all name the file.
                prop_assert!(reported.lines().all(|line| line.contains("axed.toml") || line.starts_with("and ")), "{}", reported);
            }
        }
    }

    #[test]
    fn numbers_survive_a_round_trip_through_the_record(temperature in 0.0..100.0_f64, top_p in 0.0..1.0_f64) {
        let text = format!(
            "name = \"some\"\nmodel = \"p/m\"\n[params]\ntemperature = {temperature:?}\ntop_p = {top_p:?}\n"
        );
        let agent = check_agent(text.as_bytes()).expect("an agent");
        prop_assert_eq!(agent.params.temperature, Some(temperature));
    }
}

/// What the configuration in these bytes comes to, as text.
fn configured(bytes: &[u8]) -> Result<String, String> {
    let place = tempfile::tempdir().expect("a directory");
    let path = place.path().join("axed.toml");
    fs::write(&path, bytes).expect("a file");
    let flags = Flags {
        config: Some(path),
        ..Flags::default()
    };
    let here = place.path().to_string_lossy().into_owned();
    let plain = |text: String| text.replace(&here, "");
    load(&flags, &BTreeMap::new())
        .map(|config| plain(format!("{config:?}")))
        .map_err(|error| plain(error.to_string()))
}

fn agents() -> Vec<String> {
    let entries =
        fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("agents")).expect("agents");
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let paths = paths
        .iter()
        .filter(|path| path.extension().is_some_and(|end| end == "toml"));
    let mut agents: Vec<_> = paths
        .map(|path| fs::read_to_string(path).expect("an agent"))
        .collect();
    agents.push(FULL.to_owned());
    agents
}

/// The example with every key in use.
fn config() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/axed.toml");
    fs::read_to_string(path).expect("the example")
}

/// Every key that an agent may have.
const FULL: &str = r#"name = "some"
description = "d"
model = "p/m"
fallback_models = ["q/n"]
system_prompt = """
many
lines"""
skill = "s"
files = ["*.md"]
workdir = "/tmp"
sub_agents = ["a", "b"]
stream = true
timeout = 5
[sub_agents_config]
max_depth = 2
parallel = false
timeout = 3
max_concurrent = 1
[params]
temperature = 0.7
max_tokens = 10
top_p = 0.9
stop = ["x"]
[params.response_format]
type = "json_schema"
schema = { type = "object", required = ["b"] }
[limits]
max_turns = 3
[budget]
max_tokens = 1
max_cost_usd = 0.1
max_tool_calls = 2
max_runs = 3
[retry]
max_retries = 1
backoff = "linear"
initial_delay_ms = 1
max_delay_ms = 2
[memory]
enabled = true
last_n = 1
max_entries = 2
"#;

fn with_line(text: &str, at: usize, line: &str) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.insert(at, line);
    lines.join("\n")
}

/// One of these texts with a mutation, and whether it is unchanged.
fn mutilated(texts: Vec<String>) -> impl Strategy<Value = (bool, String)> {
    let wound = (any::<Index>(), any::<Index>(), 0..5_u8, select(TOKENS));
    (select(texts), prop::collection::vec(wound, 0..5)).prop_map(|(text, wounds)| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for (at, other, kind, token) in &wounds {
            if lines.is_empty() {
                break;
            }
            let (at, other) = (at.index(lines.len()), other.index(lines.len()));
            match kind {
                0 => drop(lines.remove(at)),
                1 => lines.swap(at, other),
                2 => lines.insert(at, lines[other].clone()),
                // The value after the equals sign is another.
                3 => {
                    let key = lines[at].split('=').next().unwrap_or_default();
                    lines[at] = format!("{key}= {token}")
                        .trim_start_matches("# ")
                        .to_owned();
                }
                _ => {
                    let line = &mut lines[at];
                    let mut place = other % (line.len() + 1);
                    while !line.is_char_boundary(place) {
                        place -= 1;
                    }
                    line.insert_str(place, token);
                }
            }
        }
        (wounds.is_empty(), lines.join("\n"))
    })
}

const TOKENS: &[&str] = &[
    "=",
    "[",
    "]",
    "[[",
    "{",
    "}",
    "\"",
    "'",
    "\"\"\"",
    "#",
    ".",
    ",",
    "\\",
    "\u{e4}\u{1f980}",
    "\u{0}",
    "-1",
    "0",
    "9223372036854775807",
    "99999999999999999999",
    "1e400",
    "nan",
    "inf",
    "true",
    "\"\"",
    "\"x\"",
    "[]",
    "[1]",
    "[\"a\", \"a\"]",
    "{}",
    "{ a = 1 }",
    "1979-05-27",
    "0x7fffffff",
    "0.1",
    "\"~/x\"",
    "\"10MB\"",
    "\"5m\"",
    "\"p/m\"",
];
