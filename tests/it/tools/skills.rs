//! `skills = […]` of an agent: what the prompt says of them, and what `read_skill` reads.

use std::os::unix::fs::symlink;

use serde_json::json;

use crate::support::app::{Setup, TestApp};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, says};
use crate::tools::call_results::call_results;

const FORMS: &str = "---\nname: pdf-forms\ndescription: >-\n  Fills PDF forms.\n  Use it for PDFs.\ncompatibility: Requires qpdf\n---\n\
                     # Forms\nRead references/fields.md first.\n";

fn setup() -> Setup {
    TestApp::setup()
        .agent("worker", "skills = [\"pdf-forms\", \"../shared/tables\"]")
        .file("config/skills/pdf-forms/SKILL.md", FORMS)
        .file(
            "config/skills/pdf-forms/references/fields.md",
            "one\ntwo\nthree\n",
        )
        .file("config/skills/pdf-forms/scripts/fill.py", "print()")
        .file("config/skills/pdf-forms/.hidden", "hidden")
        .file("config/skills/other/SKILL.md", "a secret skill")
        .file(
            "shared/tables/SKILL.md",
            "---\nname: tables\ndescription: Makes tables.\n---\nAlign.",
        )
}

#[tokio::test]
async fn skills_are_listed_and_read_on_demand() {
    let app = setup().spawn().await;
    let read = |path: &str| {
        (
            "read_skill",
            json!({ "skill": "pdf-forms", "path": path, "offset": 2, "limit": 1 }),
        )
    };
    let results = call_results(
        &app,
        &[
            ("read_skill", json!({ "skill": "pdf-forms" })),
            ("read_skill", json!({ "skill": "tables" })),
            read("references/fields.md"),
            read("./scripts/fill.py"),
            ("read_skill", json!({ "skill": "other" })),
        ],
    )
    .await;
    assert_eq!(
        results[0],
        "# Forms\nRead references/fields.md first.\n\nFiles of this skill:\nreferences/fields.md\nscripts/fill.py"
    );
    assert_eq!(results[1], "Align.");
    assert_eq!(
        results[2],
        "two\n... (more follows; continue with offset 3)"
    );
    assert_eq!(
        results[3],
        "error: It has only 1 lines; offset 2 is behind its end"
    );
    assert_eq!(
        results[4],
        "error: There is no skill \"other\"; the skills are: pdf-forms, tables"
    );
    let request = app.provider.requests().remove(0);
    assert_eq!(request.tool_names(), ["read_skill"]);
    let system = request.system();
    for expected in [
        "## Skills\n\n",
        "\n- **pdf-forms**: Fills PDF forms. Use it for PDFs. (Requires qpdf)\n- **tables**: Makes tables.",
    ] {
        assert!(system.contains(expected), "{system}");
    }
    assert!(!system.contains("Align."), "{system}");
    let shown = app.get("/agents/worker").await.text;
    let skills = r#""skills":["pdf-forms","../shared/tables"]"#;
    assert!(shown.contains(skills), "{shown}");
}

#[tokio::test]
async fn nothing_outside_of_a_skill_is_read() {
    let app = setup()
        .agent("daemon", "skills = [\"../config\"]")
        .file("config/SKILL.md", FORMS)
        .agent("agents", "skills = [\"../agents\"]")
        .file("agents/SKILL.md", FORMS)
        .spawn()
        .await;
    let skill = app.path("config/skills/pdf-forms");
    symlink(app.path("config/axed.toml"), skill.join("link.md")).expect("a link");
    symlink("../other", skill.join("dir")).expect("a link");
    symlink("references/fields.md", skill.join("inner.md")).expect("a link");
    app.write(
        "config/skills/pdf-forms/large.md",
        &"x".repeat((4 << 20) + 1),
    );
    app.write("config/skills/pdf-forms/binary", "a\0b");
    let paths = [
        "link.md",
        "dir/SKILL.md",
        "../other/SKILL.md",
        "references/../../other/SKILL.md",
        "/etc/hostname",
        "large.md",
        "binary",
        "references",
        "none.md",
    ];
    let sent = paths.map(|path| ("read_skill", json!({ "skill": "pdf-forms", "path": path })));
    let results = call_results(&app, &sent).await;
    let expected = [
        "leads out of the skill's directory through a link",
        "leads out of the skill's directory through a link",
        "leads out of the skill's directory;",
        "leads out of the skill's directory;",
        "leads out of the skill's directory;",
        "has over 4194304 bytes",
        "is no text in UTF-8",
        "is no regular file",
        "does not exist; its files are: SKILL.md, binary, large.md, references/fields.md, scripts/fill.py",
    ];
    for ((path, expected), result) in paths.iter().zip(expected).zip(&results) {
        assert!(result.starts_with("error: "), "{path}: {result}");
        assert!(result.contains(expected), "{path}: {result}");
    }
    let inner = json!({ "skill": "pdf-forms", "path": "inner.md" });
    assert_eq!(
        call_results(&app, &[("read_skill", inner)]).await,
        ["one\ntwo\nthree"]
    );
    // A directory with the daemon's own files is no skill.
    for (agent, why) in [
        ("daemon", "contains files of the daemon"),
        ("agents", "lies in a directory of the daemon"),
    ] {
        let failed = app.run(agent, "go").await;
        let (_, error) = failed.failure();
        assert!(error.contains(why), "{error}");
    }
}

/// A command of an earlier call can replace what lies in its workdir.
#[tokio::test]
async fn no_link_in_a_workdir_leads_from_a_skill_to_other_files() {
    let mut app = TestApp::setup()
        .file(
            "work/one/SKILL.md",
            FORMS.replace("pdf-forms", "one").as_str(),
        )
        .file("work/plain/SKILL.md", "Be kind.")
        .file(
            "elsewhere/SKILL.md",
            FORMS.replace("pdf-forms", "one").as_str(),
        )
        .file("elsewhere/secret.md", "secret")
        .agent(
            "worker",
            "skills = [\"../work/one\"]\nworkdir = \"work\"\ntools = [\"read_file\"]",
        )
        .agent(
            "plain",
            "skill = \"../work/plain/SKILL.md\"\nworkdir = \"work\"",
        )
        .spawn()
        .await;
    let secret = || ("read_skill", json!({"skill": "one", "path": "secret.md"}));
    let replace = |name: &str, target: &str| {
        std::fs::rename(app.path(name), app.path(&format!("{name}.bak"))).expect("moved");
        symlink(app.path(target), app.path(name)).expect("a link");
    };
    // The list of skills is in the prompt, so the link is made during a turn.
    let gate = Gate::closed();
    let answers = [calls([secret()]).after_gate(&gate), says("done")];
    app.provider.will("worker", answers);
    let run = app.start("worker", "go").await;
    app.provider.wait_for_request("worker", 1).await;
    replace("work/one", "elsewhere");
    gate.open();
    assert_eq!(run.wait_for_end().await.output(), "done");
    let sent = app
        .provider
        .requests_for("worker")
        .pop()
        .expect("a request");
    let results = sent.tool_results();
    assert!(results[0].contains("could not be opened"), "{results:?}");

    app.provider.always("plain", |_| says("done"));
    assert_eq!(app.run("plain", "go").await.output(), "done");
    for (name, target) in [
        ("work/plain/SKILL.md", "elsewhere/secret.md"),
        ("work/plain", "elsewhere"),
    ] {
        replace(name, target);
        let failed = app.run("plain", "go").await;
        let (_, error) = failed.failure();
        assert!(error.contains("contains the link"), "{error}");
    }
    // Nor does one in the first run of another process, whose agent has no files.
    app.crash_and_restart().await;
    let failed = app.run("plain", "go").await;
    let (_, error) = failed.failure();
    assert!(error.contains("contains the link"), "{error}");
}

#[tokio::test]
async fn errors_in_skills_have_a_place() {
    let app = setup()
        .agent("named", "skills = [\"Forms\"]")
        .agent("twice", "skills = [\"tables\", \"../shared/tables\"]")
        .agent("file", "skills = [\"../shared/tables/SKILL.md\"]")
        .agent("missing", "skills = [\"none\"]")
        .agent("broken", "skills = [\"broken\"]")
        .agent("odd", "skills = [\"odd\"]")
        .file("config/skills/broken/SKILL.md", "---\nname: broken\n---\nx")
        .file(
            "config/skills/odd/SKILL.md",
            "---\nname: even\ndescription: x\nversion: 1\n---\nx",
        )
        .spawn()
        .await;
    for (agent, expected) in [
        (
            "named",
            "skills names \"Forms\": a skill's directory has a name",
        ),
        ("twice", "two skills cannot have the same name"),
        ("file", "name the directory, without SKILL.md"),
    ] {
        let answer = app.post(&format!("/agents/{agent}/runs"), &json!({})).await;
        let detail = answer.problem(422);
        assert!(detail.contains(expected), "{detail}");
    }
    for (agent, expected) in [
        ("missing", "skills/none/SKILL.md"),
        (
            "broken",
            "skills/broken/SKILL.md:1: description is required",
        ),
    ] {
        let failed = app.run(agent, "go").await;
        let (_, error) = failed.failure();
        assert!(error.contains(expected), "{error}");
        let shown = app.get(&format!("/agents/{agent}")).await.text;
        assert!(shown.contains(expected), "{shown}");
        assert!(shown.contains("runs fail without it"), "{shown}");
    }
    app.provider.will("odd", [says("done")]);
    assert_eq!(app.run("odd", "go").await.output(), "done");
    let shown = app.get("/agents/odd").await.text;
    for expected in [
        "SKILL.md:2: name is \\\"even\\\", but the directory makes it \\\"odd\\\"",
        "SKILL.md:4: version is no field of a skill",
    ] {
        assert!(shown.contains(expected), "{shown}");
    }
}
