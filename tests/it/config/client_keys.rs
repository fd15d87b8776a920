//! Client keys in the configuration, and secrets that are never shown.

use crate::config::server::{config, error};
use axed::config::{KeyScope, ProviderKind};
use secrecy::ExposeSecret;

#[test]
fn the_environment_overrides_keys_and_addresses() {
    let text = "[providers.openai]\napi_key = \"file\"\nbase_url = \"http://file/v1/\"\n\
                [providers.my-vllm]\nkind = \"openai\"\napi_key = \"file\"\n\
                [providers.own]\nkind = \"anthropic\"\napi_key_env = \"SECRET_ONE\"\n";
    let variables = [
        ("OPENAI_API_KEY", "env\n"),
        ("OPENAI_BASE_URL", "http://env/v1"),
        ("ANTHROPIC_API_KEY", ""),
        ("MY_VLLM_API_KEY", "mine"),
        ("AXED_MY_VLLM_BASE_URL", "http://mine:8000"),
        ("SECRET_ONE", "one"),
        ("OLLAMA_HOST", "0.0.0.0"),
        ("AXED_PROVIDERS__MY_VLLM__MAX_CONCURRENT", "4"),
        ("AXED_PROVIDERS__MY_VLLM__HEADERS__X_TEAM", "ours"),
        ("AXED_PROVIDERS__LOCAL__KIND", "ollama"),
        ("AXED_PROVIDERS__LOCAL__BASE_URL", "http://local"),
    ];
    let config = config(text, &variables).expect("a config");
    let key = |name: &str| {
        let key = config.providers[name].api_key.as_ref();
        key.map(|key| key.expose_secret().to_owned())
    };
    let base = |name: &str| config.providers[name].base_url.clone();
    assert_eq!(key("openai").as_deref(), Some("env"));
    assert_eq!(base("openai").as_deref(), Some("http://env/v1"));
    assert_eq!(key("anthropic"), None);
    assert_eq!(key("my-vllm").as_deref(), Some("mine"));
    assert_eq!(base("my-vllm").as_deref(), Some("http://mine:8000"));
    assert_eq!(config.providers["my-vllm"].max_concurrent, Some(4));
    assert_eq!(
        config.providers["my-vllm"].headers["x-team"].expose_secret(),
        "ours"
    );
    assert_eq!(key("own").as_deref(), Some("one"));
    assert_eq!(config.providers["own"].key_env, "SECRET_ONE");
    assert_eq!(config.providers["own"].kind, ProviderKind::Anthropic);
    assert_eq!(base("ollama").as_deref(), Some("http://127.0.0.1:11434"));
    assert_eq!(config.providers["local"].kind, ProviderKind::Ollama);
    assert_eq!(base("local").as_deref(), Some("http://local"));
}

#[test]
fn a_secret_is_never_shown() {
    let text = "[providers.openai]\napi_key = \"sk-hidden\"\n[providers.openai.headers]\nx-token = \"sk-hidden\"\n";
    let shown = format!(
        "{:?}",
        config(text, &[("ANTHROPIC_API_KEY", "sk-hidden")]).expect("a config")
    );
    assert!(!shown.contains("sk-hidden"), "{shown}");
    for (text, variables) in [
        (
            "[providers.openai]\napi_key = \"sk-hidden\\u0007\"",
            &[][..],
        ),
        ("[providers.openai]\napi_key = \"sk-hidden", &[]),
        ("[providers.openai]\napi_key = \"${sk-hidden}\"", &[]),
        ("[providers.openai]\napi_key_env = \"sk-hidden\"", &[]),
        ("[providers.openai.headers]\nx = \"sk-hidden\\n\"", &[]),
        (
            "[providers.openai]\nbase_url = \"http://u:sk-hidden@x\"",
            &[],
        ),
        ("", &[("OPENAI_API_KEY", "sk-hidden\u{7}")]),
        ("", &[("AXED_PROVIDERS__OPENAI__MAX_REPLY", "sk-hidden")]),
    ] {
        let reported = error(text, variables);
        assert!(!reported.contains("sk-hidden"), "{reported}");
    }
}

#[test]
fn client_keys_are_checked_strictly() {
    let hash = "0123456789abcdef".repeat(4);
    let text = format!(
        "[auth.keys.a]\nsha256 = \"{hash}\"\nscopes = [\"run\", \"read\"]\nagents = [\"team-*\"]\n\
         [auth.keys.b]\nsha256 = \"{}\"\nscopes = [\"admin\"]",
        hash.replace('0', "A")
    );
    let variables = [("AXED_AUTH__KEYS__A__AGENTS", "x, y-*")];
    let keys = config(&text, &variables).expect("a config").auth.keys;
    let [a, b] = keys.as_slice() else {
        panic!("{keys:?}");
    };
    assert_eq!((a.name.as_str(), a.sha256.to_string()), ("a", hash.clone()));
    assert!(a.has_scope(KeyScope::Run) && a.has_scope(KeyScope::Read));
    assert!(!a.has_scope(KeyScope::Cancel) && !a.has_scope(KeyScope::Metrics) && !a.is_admin());
    assert!(
        a.can_use_agent("x")
            && a.can_use_agent("y-1")
            && !a.can_use_agent("y")
            && !a.can_use_agent("team-x")
    );
    assert!(b.has_scope(KeyScope::Run) && b.has_scope(KeyScope::Metrics) && b.is_admin());
    assert!(b.can_use_agent("any"));
    assert!(!format!("{keys:?}").contains(&hash), "{keys:?}");

    let known = "run, read, cancel, approve, admin, metrics";
    let good = format!("sha256 = \"{hash}\"\nscopes = [\"run\"]\n");
    for (text, reported) in [
        (
            "[auth.keys.a]\nscopes = [\"run\"]".to_owned(),
            "1:12: auth.keys.a.sha256 is required: the SHA-256 of the key in hex, as axed keys new prints it".to_owned(),
        ),
        (
            format!("[auth.keys.a]\nsha256 = \"{hash}\""),
            format!("1:12: auth.keys.a.scopes is required: one or more of: {known}"),
        ),
        (
            format!("[auth.keys.a]\nscopes = []\nsha256 = \"{hash}\""),
            format!("2:1: auth.keys.a.scopes must contain at least one of: {known}"),
        ),
        (
            format!("[auth.keys.a]\nscopes = [\"write\"]\nsha256 = \"{hash}\""),
            format!("2:1: auth.keys.a.scopes contains \"write\", which is not one of: {known}"),
        ),
        (
            format!("[auth.keys.a]\nagents = [\"a[\"]\n{good}"),
            "2:1: auth.keys.a.agents has an invalid glob pattern \"a[\": unclosed character class; missing ']'".to_owned(),
        ),
        (
            format!("[auth.keys.a]\nagents = [\"\"]\n{good}"),
            "2:1: auth.keys.a.agents contains a blank pattern; \"*\" means all agents".to_owned(),
        ),
        (
            format!("[auth.keys.a]\nscope = 1\n{good}"),
            "2:1: unknown key \"auth.keys.a.scope\"; did you mean \"auth.keys.a.scopes\"?".to_owned(),
        ),
        (
            format!("[auth.keys.a]\n{good}[auth.keys.b]\n{good}"),
            "5:1: auth.keys.b.sha256 is also the hash of auth.keys.a; a key has one name".to_owned(),
        ),
        (
            format!("[auth.keys.\"a b\"]\n{good}"),
            "1:12: auth.keys.\"a b\" is not a valid key name: up to 64 letters, digits, - _ . without two _ in a row".to_owned(),
        ),
    ] {
        assert_eq!(error(&text, &[]), format!("DIR/axed.toml:{reported}"));
    }
    let pasted = error(
        "[auth.keys.a]\nsha256 = \"axed_hidden\"\nscopes = [\"run\"]",
        &[],
    );
    assert!(!pasted.contains("axed_hidden"), "{pasted}");
}
