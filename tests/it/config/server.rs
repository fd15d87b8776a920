//! The server's configuration: sources, defaults, and the positions in errors.

use axed::config::environment::Environment;
use axed::config::load::{Flags, load};
use axed::config::{Config, Durability, LogFormat, Provider, Retention, RetentionLimit};
use secrecy::ExposeSecret;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A configuration from a file of this text and these variables.
pub fn config(text: &str, variables: &[(&str, &str)]) -> Result<Config, String> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("axed.toml");
    std::fs::write(&path, text).expect("a file");
    let flags = Flags {
        config: Some(path),
        ..Flags::default()
    };
    load(&flags, &environment(variables)).map_err(|error| {
        error
            .to_string()
            .replace(&dir.path().display().to_string(), "DIR")
    })
}

fn environment(variables: &[(&str, &str)]) -> Environment {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    variables.iter().map(owned).collect()
}

pub fn error(text: &str, variables: &[(&str, &str)]) -> String {
    config(text, variables).expect_err("an error")
}

#[test]
fn an_empty_configuration_has_every_default() {
    let config = config("", &[]).expect("a config");
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(config.server.metrics_listen, None);
    assert_eq!(config.server.path_prefix, "");
    assert!(config.server.trusted_proxies.is_empty());
    assert_eq!(config.server.max_body, 4 << 20);
    assert_eq!(config.server.max_pending_per_address, 1_000);
    assert_eq!(config.server.max_pending_connections, 10_000);
    assert_eq!(config.server.max_wait, Duration::from_secs(300));
    assert_eq!(config.server.default_timeout, Duration::from_secs(120));
    assert_eq!(config.server.max_timeout, Duration::from_secs(86_400));
    assert_eq!(config.server.drain_timeout, Duration::from_secs(25));
    assert_eq!(config.agents.dirs, [PathBuf::from("agents")]);
    assert!(config.agents.watch);
    assert_eq!(config.data.dir, Path::new("data"));
    assert_eq!(config.data.durability, Durability::Process);
    assert_eq!(config.data.retention, Retention::default());
    assert_eq!(
        (config.runs.max_running, config.runs.max_queued),
        (10_000, 100_000)
    );
    assert_eq!((config.limits.loop_warn, config.limits.loop_stop), (3, 6));
    assert_eq!(
        (config.limits.context_files, config.limits.labels),
        (1 << 20, 64)
    );
    assert!(config.webhooks.allow_hosts.is_empty());
    assert_eq!(config.webhooks.secret_env, None);
    assert_eq!(config.webhooks.first_retry, Duration::from_secs(5));
    assert_eq!(config.tools.max_result, 256 << 10);
    assert!(config.tools.roots.is_empty());
    let own = |it: &(&String, &Provider)| !it.1.is_preset;
    let providers: Vec<&String> = config.providers.iter().filter(own).map(|it| it.0).collect();
    assert_eq!(providers, ["anthropic", "ollama", "openai"]);
    let gemini = &config.providers["gemini"];
    assert_eq!(gemini.key_env, "GEMINI_API_KEY");
    assert!(gemini.is_preset && gemini.base_url.is_some());
    assert_eq!(
        config.providers["azure"].missing_address,
        Some("AZURE_OPENAI_ENDPOINT")
    );
    let openai = &config.providers["openai"];
    assert_eq!(openai.key_env, "OPENAI_API_KEY");
    assert_eq!(openai.max_reply, 32 << 20);
    assert!(openai.api_key.is_none() && openai.base_url.is_none());
}

#[test]
fn flags_override_variables_and_variables_override_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("axed.toml");
    let text = "[server]\nlisten = \"127.0.0.1:1\"\nmax_wait = 1\npath_prefix = \"axed/\"\n[agents]\ndirs = [\"a\"]\n";
    std::fs::write(&path, text).expect("a file");
    let file = path.display().to_string();
    let variables = environment(&[
        ("AXED_CONFIG", &file),
        ("AXED_SERVER__LISTEN", "127.0.0.1:2"),
        ("AXED_SERVER__MAX_WAIT", "2"),
        ("AXED_SERVER__PATH_PREFIX", ""),
        ("AXED_SERVER__MAX_BODY", "1 MiB"),
        ("AXED_SERVER__TRUSTED_PROXIES", "10.1.2.3/8, ::1"),
        ("AXED_AGENTS__DIRS", "b, c"),
        ("AXED_AGENTS__WATCH", "false"),
        ("AXED_RUNS__MAX_RUNNING", "7"),
        ("AXED_DATA__DIR", "~/d"),
        ("AXED_TOOLS__ROOTS", "[\"x,y\", \"z\"]"),
        ("HOME", "/home/ada"),
    ]);
    let flags = Flags {
        listen: Some("localhost:3".to_owned()),
        log_format: Some("json".to_owned()),
        ..Flags::default()
    };
    let config = load(&flags, &variables).expect("a config");
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:3");
    assert_eq!(config.server.max_wait, Duration::from_secs(2));
    assert_eq!(config.server.path_prefix, "/axed");
    assert_eq!(config.server.max_body, 1 << 20);
    let proxies: Vec<String> = config
        .server
        .trusted_proxies
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(proxies, ["10.0.0.0/8", "::1/128"]);
    assert_eq!(config.agents.dirs, [PathBuf::from("b"), PathBuf::from("c")]);
    assert!(!config.agents.watch);
    assert_eq!(config.runs.max_running, 7);
    assert_eq!(config.data.dir, Path::new("/home/ada/d"));
    assert_eq!(
        config.tools.roots,
        [PathBuf::from("x,y"), PathBuf::from("z")]
    );
    assert_eq!(config.telemetry.log_format, Some(LogFormat::Json));
    assert_eq!(config.config_dir, dir.path());

    let flags = Flags {
        agents: vec![PathBuf::from("d")],
        data: Some(PathBuf::from("e")),
        ..flags
    };
    let config = load(&flags, &variables).expect("a config");
    assert_eq!(config.agents.dirs, [PathBuf::from("d")]);
    assert_eq!(config.data.dir, Path::new("e"));
}

#[test]
fn a_named_file_must_exist() {
    let flags = Flags {
        config: Some(PathBuf::from("/nowhere/axed.toml")),
        ..Flags::default()
    };
    let reported = load(&flags, &Environment::new()).expect_err("an error");
    assert_eq!(
        reported.to_string(),
        "--config: there is no config file /nowhere/axed.toml; without it axed reads config/axed.toml or /etc/axed/axed.toml, whichever is there"
    );
    let reported = load(
        &Flags::default(),
        &environment(&[("AXED_CONFIG", "/nowhere/x")]),
    );
    let reported = reported.expect_err("an error").to_string();
    let expected = "AXED_CONFIG: there is no config file /nowhere/x; without it";
    assert!(reported.starts_with(expected), "{reported}");
}

/// Files with their errors.
const WRONG_FILES: &[(&str, &str)] = &[
    (
        "[server]\nlistn = \"x\"",
        "DIR/axed.toml:2:1: unknown key \"server.listn\"; did you mean \"server.listen\"?",
    ),
    (
        "[servr]\n",
        "DIR/axed.toml:1:2: unknown key \"servr\"; did you mean \"server\"?",
    ),
    (
        "[server]\nmax_wait = -1",
        "DIR/axed.toml:2:1: server.max_wait must be non-negative",
    ),
    (
        "[server.cors]\norigins = [\"https://app.example/x\"]",
        "DIR/axed.toml:2:1: server.cors.origins contains \"https://app.example/x\", which is not an origin; write a scheme and a host, such as \"https://app.example\", without a path",
    ),
    (
        "[server.cors]\norigins = [\"*\"]\ncredentials = true",
        "DIR/axed.toml:3:1: server.cors.credentials cannot be true with origins = [\"*\"]: any page could then act with the cookies of the person who opens it; name the origins",
    ),
    (
        "[server.cors]\ncredentials = true",
        "DIR/axed.toml:1:9: server.cors.origins is required with credentials: the origins of the pages, such as [\"https://app.example\"]",
    ),
    (
        "[webhooks]\nallow_hosts = [\"a.b\", \"http://a:80\"]",
        "DIR/axed.toml:2:1: webhooks.allow_hosts contains \"http://a:80\", which is not a host; write names or addresses \
             without scheme, port and path",
    ),
    (
        "[webhooks]\nsecret_env = \"whsec_hush=\"",
        "DIR/axed.toml:2:1: webhooks.secret_env must be the name of an environment variable, and not the secret itself",
    ),
    (
        "[server]\nmax_wait = \"1\"",
        "DIR/axed.toml:2:1: server.max_wait must be a whole number, not a string",
    ),
    (
        "[data]\ndurability = \"none\"",
        "DIR/axed.toml:2:1: data.durability must be one of: process, power",
    ),
    (
        "[runs]\nmax_running = 0",
        "DIR/axed.toml:2:1: runs.max_running must be at least 1",
    ),
    (
        "[runs.per_agent]\nplanner = 0",
        "DIR/axed.toml:2:1: runs.per_agent.planner must be at least 1",
    ),
    (
        "[runs.per_agent]\n\"../x\" = 1",
        "DIR/axed.toml:2:1: runs.per_agent.\"../x\" is not a valid agent name",
    ),
    (
        "[runs]\nper_agent = 1",
        "DIR/axed.toml:2:1: runs.per_agent must be a table, not a whole number",
    ),
    (
        "[runs]\nper_key = \"many\"",
        "DIR/axed.toml:2:1: runs.per_key must be a whole number, not a string",
    ),
    (
        "[runs.per_key]\nci = true",
        "DIR/axed.toml:2:1: runs.per_key.ci is not a key of [auth.keys]; \"*\" stands for all other keys",
    ),
    (
        "[runs.per_key]\n\"*\" = true",
        "DIR/axed.toml:2:1: runs.per_key.\"*\" must be a whole number, not true or false",
    ),
    (
        "[agents]\ndirs = []",
        "DIR/axed.toml:2:1: agents.dirs must name at least one directory",
    ),
    (
        "[auth.keys.a]\nsha256 = \"x\"\nscopes = [\"run\"]",
        "DIR/axed.toml:2:1: auth.keys.a.sha256 must be the SHA-256 of the key, 64 digits in hex, and not the key itself",
    ),
    (
        "[server]\ntrusted_proxies = [\"10.0.0.0/8\", \"nginx\"]",
        "DIR/axed.toml:2:1: server.trusted_proxies contains \"nginx\", which is not an address or a network; write them such as \"10.0.0.7\" or \"10.0.0.0/8\"",
    ),
    (
        "[tools]\nweb_search = \"x\"",
        "DIR/axed.toml:2:1: tools.web_search must be a table, not a string",
    ),
    (
        "[tools]\npass_env = [\"TOKEN=abc\"]",
        "DIR/axed.toml:2:1: tools.pass_env must contain names of environment variables, not their values",
    ),
    (
        "[tools]\npass_env = [\"HOME\"]",
        "DIR/axed.toml:2:1: tools.pass_env contains HOME, which axed sets for each command",
    ),
    (
        "[tools.url_fetch]\nallow_hosts = [\"http://a\"]",
        "DIR/axed.toml:2:1: tools.url_fetch.allow_hosts contains \"http://a\", which is not a host; write names or addresses without scheme, port and path",
    ),
    (
        "[tools.web_search]\nkind = \"brave\"",
        "DIR/axed.toml:1:8: tools.web_search.url is required: the address of the search service, such as \"http://127.0.0.1:8888/search\"",
    ),
    (
        "[tools.web_search]\nurl = \"http://a\"\nkind = \"other\"",
        "DIR/axed.toml:3:1: tools.web_search.kind must be one of: searxng, brave",
    ),
    (
        "[tools.web_search]\nurl = \"http://a\"\napi_key_env = \"sk-hush\"",
        "DIR/axed.toml:3:1: tools.web_search.api_key_env must be the name of an environment variable, and not the secret itself",
    ),
    (
        "[tools.web_search]\nurl = \"https://me:hush@a\"",
        "DIR/axed.toml:2:1: tools.web_search.url must not hold a user or password",
    ),
    (
        "[providers.vllm]\nbase_url = \"http://x\"",
        "DIR/axed.toml:1:12: providers.vllm.kind is required, one of: anthropic, openai, ollama, scripted",
    ),
    (
        "[providers.openai.limits.\"gpt-6\"]\nrequests_per_minute = 0",
        "DIR/axed.toml:2:1: providers.openai.limits.gpt-6.requests_per_minute must be at least 1",
    ),
    (
        "[providers.openai.limits.\"gpt-*-sol\"]\nrequests_per_minute = 5",
        "DIR/axed.toml:1:26: providers.openai.limits.\"gpt-*-sol\" is neither a model nor the beginning of the names of several: \"*\" may only be its last character",
    ),
    (
        "[providers.openai]\nversion = \"x\"",
        "DIR/axed.toml:2:1: providers.openai.version is only for kind = \"anthropic\"",
    ),
    (
        "[prices.gpt]\ninput = 1",
        "DIR/axed.toml:1:9: prices.gpt is not provider/model; write one such as [prices.\"openai/gpt-6-sol\"]",
    ),
    (
        "[prices.\"a/b\"]\ninput = -1\noutput = 1",
        "DIR/axed.toml:2:1: prices.\"a/b\".input must be non-negative",
    ),
    (
        "[prices.\"openai/mine\"]\ninput = 1",
        "DIR/axed.toml:1:9: prices.\"openai/mine\".output is required: axed knows no price of this model; set output = 0 if it costs nothing",
    ),
    (
        "[providers.openai.models.mine]\noutput = 1",
        "DIR/axed.toml:1:26: providers.openai.models.mine.input is required: axed knows no price of this model; set input = 0 if it costs nothing",
    ),
];

/// Variables with their values and errors.
const WRONG_VARIABLES: &[(&str, &str, &str)] = &[
    (
        "AXED_SERVER__MAX_WAIT",
        "soon",
        "AXED_SERVER__MAX_WAIT: server.max_wait must be a whole number, not this text",
    ),
    (
        "AXED_SERVER__LISTN",
        "x",
        "AXED_SERVER__LISTN: unknown key \"server.listn\"; did you mean \"server.listen\"?",
    ),
    (
        "AXED_SERVR__LISTEN",
        "x",
        "AXED_SERVR__LISTEN: unknown key \"servr\"; did you mean \"server\"?",
    ),
    (
        "AXED_DATA__URL",
        "mysql://me:hush@x",
        "AXED_DATA__URL: data.url is no PostgreSQL URL, such as postgres://user@host/database",
    ),
    (
        "AXED_DATA__LISTEN_URL",
        "mysql://me:hush@x",
        "AXED_DATA__LISTEN_URL: data.listen_url is no PostgreSQL URL, such as postgres://user@host/database",
    ),
    (
        "OPENAI_BASE_URL",
        "nonsense",
        "OPENAI_BASE_URL: must be an http or https address such as http://localhost:8000/v1",
    ),
];

#[test]
fn errors_name_file_line_and_key_or_the_variable_or_the_flag() {
    for (text, reported) in WRONG_FILES {
        assert_eq!(error(text, &[]), *reported);
    }
    assert!(
        error("[server]\nlisten = \"8080\"", &[])
            .contains("is \"8080\", which is not an address and port")
    );
    let both = error("[server]\nmax_wait = 1 2\nlisten = \n", &[]);
    assert!(
        both.contains("DIR/axed.toml:2:") && both.contains("DIR/axed.toml:3:"),
        "{both}"
    );
    for (name, value, reported) in WRONG_VARIABLES {
        assert_eq!(error("", &[(name, value)]), *reported);
    }
    let flags = Flags {
        listen: Some("here".to_owned()),
        ..Flags::default()
    };
    let reported = load(&flags, &Environment::new())
        .expect_err("an error")
        .to_string();
    assert!(
        reported.starts_with("--listen: server.listen is \"here\""),
        "{reported}"
    );
}

#[test]
fn runs_of_an_agent_and_of_a_key_are_limited_by_name() {
    let key = |name| {
        format!(
            "[auth.keys.{name}]\nsha256 = \"{:064}\"\nscopes = [\"run\"]\n",
            7
        )
    };
    let text = format!(
        "{}[runs.per_agent]\nplanner = 2\n[runs.per_key]\nci = 5\n\"*\" = 100\n",
        key("ci")
    );
    let runs = config(&text, &[("AXED_RUNS__PER_AGENT__READER", "3")]).expect("a config");
    let limits = runs.runs.per_agent;
    assert_eq!((limits["planner"], limits["reader"]), (2, 3));
    let per_key = runs.runs.per_key;
    assert_eq!(
        (per_key.limit_for("ci"), per_key.limit_for("ada")),
        (Some(5), Some(100))
    );

    let each = config("[runs]\nper_key = 100", &[]).expect("a config");
    assert_eq!(each.runs.per_key.limit_for("ada"), Some(100));
    let each = config("", &[("AXED_RUNS__PER_KEY", "7")]).expect("a config");
    assert_eq!(each.runs.per_key.limit_for("ada"), Some(7));
    let none = config("", &[]).expect("a config").runs;
    assert!(none.per_agent.is_empty() && none.per_key.limit_for("ada").is_none());
}

#[test]
fn axeds_variables_override_the_services() {
    let variables = [
        ("OPENAI_BASE_URL", "http://theirs"),
        ("AXED_OPENAI_BASE_URL", "http://ours"),
        ("ANTHROPIC_API_KEY", "theirs"),
        ("AXED_PROVIDERS__ANTHROPIC__API_KEY", "ours"),
    ];
    let config = config("", &variables).expect("a config");
    assert_eq!(
        config.providers["openai"].base_url.as_deref(),
        Some("http://ours")
    );
    let key = config.providers["anthropic"]
        .api_key
        .as_ref()
        .expect("a key");
    assert_eq!(key.expose_secret(), "ours");
}

#[test]
fn prices_scripts_and_zeros_are_read() {
    let text = "[prices.\"openai/gpt\"]\ninput = 2\noutput = 8.5\ncache_read = 0\n\
                [prices.\"ollama/llama\"]\ninput = 0\n[providers.ollama.models.qwen]\noutput = 1\n\
                [providers.scripted]\nscripts = [\"s.toml\", \"/abs\"]\nmax_concurrent = 0\ntimeout = 0\n";
    let variables = [
        ("AXED_PRICES__OPENAI_GPT__OUTPUT", "9"),
        ("AXED_PRICES__a/B__INPUT", "1"),
        ("AXED_PRICES__a/B__OUTPUT", "0"),
    ];
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("axed.toml");
    std::fs::write(&path, text).expect("a file");
    let flags = Flags {
        config: Some(path),
        ..Flags::default()
    };
    let config = load(&flags, &environment(&variables)).expect("a config");
    let price = config
        .models
        .get("openai", "gpt")
        .and_then(|facts| facts.price)
        .expect("a price");
    assert_eq!(
        (
            price.input,
            price.output,
            price.cache_read,
            price.cache_write
        ),
        (2.0, 9.0, Some(0.0), None)
    );
    assert_eq!(
        config
            .models
            .get("a", "B")
            .and_then(|facts| facts.price)
            .map_or(0.0, |price| price.input),
        1.0
    );
    for (model, expected) in [("llama", (0.0, 0.0)), ("qwen", (0.0, 1.0))] {
        let facts = config.models.get("ollama", model).expect(model);
        let price = facts.price.expect("a price");
        assert_eq!(
            (price.input, price.output),
            expected,
            "the rest costs nothing"
        );
    }
    let scripted = &config.providers["scripted"];
    assert_eq!(
        scripted.scripts,
        [dir.path().join("s.toml"), PathBuf::from("/abs")]
    );
    assert_eq!((scripted.max_concurrent, scripted.timeout), (None, None));
}

#[test]
fn the_shipped_configuration_is_valid_with_every_key_uncommented() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/axed.toml");
    let Ok(text) = std::fs::read_to_string(&path) else {
        return;
    };
    config(&text, &[("HOME", "/home/ada")]).expect("the shipped config");
    let uncommented: Vec<&str> = text.lines().map(uncommented).collect();
    config(&uncommented.join("\n"), &[("HOME", "/home/ada")]).expect("every key of it");
}

/// A commented key or table without its comment sign; any other line unchanged.
fn uncommented(line: &str) -> &str {
    let Some(rest) = line
        .strip_prefix('#')
        .map(|rest| rest.strip_prefix(' ').unwrap_or(rest))
    else {
        return line;
    };
    let is_key = |key: &str| {
        !key.is_empty()
            && key
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-'))
    };
    let is_table = rest.starts_with('[') && rest.trim_end().ends_with(']');
    match is_table
        || rest
            .split_once(" = ")
            .is_some_and(|(key, _)| is_key(key.trim_matches('"')))
    {
        true => rest,
        false => line,
    }
}

#[test]
fn retention_applies_to_all_runs_or_to_one_status() {
    let kept = |seconds: u64, count: usize| RetentionLimit {
        age: (seconds > 0).then(|| Duration::from_secs(seconds)),
        count: (count > 0).then_some(count),
    };
    let text = "[data.retention]\nage = \"30d\"\ncount = 100000\n\
                completed = { age = 90 }\nfailed = { age = 0, count = 5 }\n";
    let config_of = |variables: &[_]| config(text, variables).expect("a config");
    let retention = config_of(&[]).data.retention;
    assert_eq!(retention.completed, kept(90, 100_000));
    assert_eq!(retention.failed, kept(0, 5));
    assert_eq!(retention.cancelled, kept(2_592_000, 100_000));

    let variables = [
        ("AXED_DATA__RETENTION__AGE", "2 h"),
        ("AXED_DATA__RETENTION__FAILED__COUNT", "7"),
        (
            "AXED_DATA__RETENTION__CANCELLED",
            "{ age = \"1w\", count = 0 }",
        ),
    ];
    let retention = config_of(&variables).data.retention;
    assert_eq!(retention.completed, kept(90, 100_000));
    assert_eq!(retention.failed, kept(0, 7));
    assert_eq!(retention.cancelled, kept(604_800, 0));

    let wrong = "data.retention.age must be a duration of at most 4294967295 seconds: a whole number of seconds, or text \
                 such as \"30d\" (s, m, h, d or w)";
    for age in ["\"soon\"", "-1", "true", "\"9999999w\""] {
        let reported = error(&format!("[data.retention]\nage = {age}"), &[]);
        assert_eq!(reported, format!("DIR/axed.toml:2:1: {wrong}"));
    }
    assert_eq!(
        error("data.retention.failed.count = -1", &[]),
        "DIR/axed.toml:1:23: data.retention.failed.count must be non-negative"
    );
    assert_eq!(
        error("[data.retention]\nrunning = {}", &[]),
        "DIR/axed.toml:2:1: unknown key \"data.retention.running\"; the keys known here are: age, cancelled, \
         completed, count, failed"
    );
}

#[test]
fn an_invalid_pattern_names_its_line_and_key() {
    let text = "[data]\nredact = [\n  'sk-\\d+',\n  '(unclosed',\n]";
    let error = error(text, &[]);
    assert!(error.starts_with("DIR/axed.toml:4:3: "), "{error}");
    assert!(error.contains("data.redact"), "{error}");
    assert!(error.contains("unclosed"), "{error}");
}
