//! Errors of `[[triggers]]`, each with its position.

use crate::support::daemon::axed_command;

/// What `axed agents check` prints for an agent with this trigger.
fn check(trigger: &str) -> String {
    let home = tempfile::tempdir().expect("a directory");
    let agent = format!("name = \"a\"\nmodel = \"scripted/x\"\n[[triggers]]\n{trigger}\n");
    std::fs::create_dir(home.path().join("agents")).expect("a directory");
    std::fs::write(home.path().join("agents/a.toml"), agent).expect("a file");
    let output = axed_command(home.path(), &["agents", "check", "--agents", "agents"])
        .into_std()
        .output()
        .expect("an output");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn errors_name_line_and_key() {
    let start = "name = \"x\"\nkind = \"github\"\n";
    for (trigger, expected) in [
        ("", "a.toml:3:1: error: triggers[0].name is required"),
        (
            "name = \"x\"\nkind = \"gitlab\"",
            "a.toml:5:1: error: triggers[0].kind must be one of: standard, github, stripe",
        ),
        (
            start,
            "a.toml:3:1: error: triggers[0].secret_env is required",
        ),
        (
            &format!("{start}secret_env = \"whsec_abc=\""),
            "a.toml:6:1: error: triggers[0].secret_env must be the name of an environment variable",
        ),
        (
            &format!("{start}secret_env = \"S\"\ninput_template = \"{{title}}\""),
            "a.toml:7:1: error: triggers[0].input_template has {title}, which is no value of the body",
        ),
        (
            &format!("{start}secret_env = \"S\"\ntemplate = \"x\""),
            "a.toml:7:1: error: unknown key \"triggers[0].template\"",
        ),
        (
            &format!("{start}secret_env = \"S\""),
            "a.toml:6:1: warning: the environment variable S with the secret of trigger x is not set",
        ),
    ] {
        let found = check(trigger);
        assert!(found.contains(expected), "{trigger}\n{found}");
    }
}
