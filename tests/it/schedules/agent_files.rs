//! Errors of `[[schedules]]`, each with its position.

use std::process::Output;

use crate::support::daemon::axed_command;

/// What `axed agents check` prints for an agent with this schedule.
fn check(schedule: &str, config: &str) -> String {
    let agent = format!("name = \"a\"\nmodel = \"scripted/x\"\n[[schedules]]\n{schedule}\n");
    check_agent(&agent, config)
}

fn check_agent(agent: &str, config: &str) -> String {
    let home = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(home.path().join("agents")).expect("a directory");
    std::fs::write(home.path().join("agents/a.toml"), agent).expect("a file");
    std::fs::write(home.path().join("axed.toml"), config).expect("a file");
    let arguments = [
        "agents",
        "check",
        "--config",
        "axed.toml",
        "--agents",
        "agents",
    ];
    let Output { stdout, stderr, .. } = axed_command(home.path(), &arguments)
        .into_std()
        .output()
        .expect("an output");
    String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned()
}

#[test]
fn errors_name_line_key_and_field() {
    for (schedule, expected) in [
        (
            "cron = \"0 9 * * *\"",
            "a.toml:3:1: error: schedules[0].name is required",
        ),
        (
            "name = \"x\"",
            "a.toml:3:1: error: schedules[0].cron is required",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * * *\"\ninput = \"go\"\neval = { dataset = \"release\" }",
            "a.toml:7:1: error: schedules[0].eval cannot stand beside input, which is for runs",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * * *\"\neval = { against = \"last\" }",
            "a.toml:6:1: error: schedules[0].eval.dataset is required: the name of a dataset",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * * *\"\neval = { dataset = \"release\", against = \"first\" }",
            "schedules[0].eval.against",
        ),
        (
            "name = \"x\"\ncron = \"0 25 * * *\"",
            "a.toml:5:1: error: schedules[0].cron has \"25\" as hour: it must be a number from 0 to 23",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * *\"",
            "a.toml:5:1: error: schedules[0].cron must be five fields",
        ),
        (
            "name = \"x\"\ncron = \"0 0 30 2 *\"",
            "a.toml:5:1: error: schedules[0].cron never occurs",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * * *\"\ntimezone = \"Europe/Berln\"",
            "a.toml:6:1: error: schedules[0].timezone is no known time zone: \"Europe/Berln\"; did you mean \"Europe/Berlin\"?",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * * *\"\noverlap = \"wait\"",
            "a.toml:6:1: error: schedules[0].overlap must be one of: skip, queue, allow",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * * *\"\ntimzone = \"UTC\"",
            "a.toml:6:1: error: unknown key \"schedules[0].timzone\"; did you mean \"schedules[0].timezone\"?",
        ),
        (
            "name = \"x\"\ncron = \"0 9 * * *\"\n[[schedules]]\nname = \"X\"\ncron = \"0 9 * * *\"",
            "error: schedules has two entries named \"X\"; name one otherwise",
        ),
        (
            "name = \"a/b\"\ncron = \"0 9 * * *\"",
            "a.toml:4:1: error: schedules[0].name must be 1 to 64 letters",
        ),
    ] {
        let found = check(schedule, "");
        assert!(found.contains(expected), "{schedule}\n{found}");
    }
}

#[test]
fn an_input_that_the_agent_would_refuse_is_an_error_of_the_file() {
    const OBJECTS: &str = "[input_schema]\ntype = \"object\"\nrequired = [\"days\"]\nproperties = { days = { type = \"integer\" } }\n";
    for (schema, input, expected) in [
        (
            "",
            "input = 3",
            "a.toml:6:1: error: schedules[0].input must be a string or a table, not a whole number",
        ),
        (
            "",
            "input = { days = 1 }",
            "a.toml:6:1: error: schedules[0].input is a table, but the agent takes a text: it has no [input_schema]",
        ),
        (
            OBJECTS,
            "input = { days = \"one\" }",
            "a.toml:6:1: error: schedules[0].input does not fit [input_schema]: /days: ",
        ),
        (
            OBJECTS,
            "input = \"yesterday\"",
            "a.toml:6:1: error: schedules[0].input must be a table, or the JSON of an object",
        ),
        (
            OBJECTS,
            "",
            "a.toml:3:1: error: schedules[0].input does not fit [input_schema]: ",
        ),
        (OBJECTS, "input = { days = 1 }", ""),
        (OBJECTS, "input = '{\"days\": 1}'", ""),
    ] {
        let schedule = format!("[[schedules]]\nname = \"x\"\ncron = \"0 9 * * *\"\n{input}\n");
        let agent = format!("name = \"a\"\nmodel = \"scripted/x\"\n{schedule}{schema}");
        let found = check_agent(&agent, "");
        assert!(found.contains(expected), "{agent}\n{found}");
        let has_error = found.contains("schedules[0]");
        assert_eq!(has_error, !expected.is_empty(), "{agent}\n{found}");
    }
}

#[test]
fn a_key_that_the_server_lacks_is_an_error_with_a_suggestion() {
    let schedule = "name = \"x\"\ncron = \"0 9 * * *\"\nkey = \"adda\"";
    let found = check(schedule, "");
    assert!(
        found.contains("a.toml:6:1: warning: schedules[0].key has no effect"),
        "{found}"
    );
    let key = format!("sha256 = \"{}\"\nscopes = [\"run\"]", "0".repeat(64));
    let found = check(schedule, &format!("[auth.keys.ada]\n{key}"));
    let expected = "a.toml:6:1: error: schedules[0].key names \"adda\", which is no key of the server's configuration, \
                    so that no run starts; did you mean \"ada\"?";
    assert!(found.contains(expected), "{found}");
    let found = check(
        &schedule.replace("adda", "ada"),
        &format!("[auth.keys.ada]\nagents = [\"b*\"]\n{key}"),
    );
    assert!(found.contains("whose agents"), "{found}");
}
