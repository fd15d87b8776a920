//! How deep a tree may grow: the root's limit governs, a child can only tighten it.

use crate::support::app::{Setup, TestApp};
use crate::support::provider::answer::{delegates, says};

const CHAIN: [&str; 7] = ["a", "b", "c", "d", "e", "f", "g"];

/// Agents that may each call the next, `a` first; `limits` are `max_depth`s by name.
fn chain(limits: &[(&str, u8)]) -> Setup {
    let mut setup = TestApp::setup();
    for (at, agent) in CHAIN.iter().enumerate() {
        let mut toml = String::new();
        if let Some(next) = CHAIN.get(at + 1) {
            toml.push_str(&format!("sub_agents = [\"{next}\"]\n"));
        }
        if let Some((_, limit)) = limits.iter().find(|(name, _)| name == agent) {
            toml.push_str(&format!("[sub_agents_config]\nmax_depth = {limit}\n"));
        }
        setup = setup.agent(agent, &toml);
    }
    setup
}

/// Runs `a` with agents that all delegate while they can, and returns the agents that were reached.
async fn reached(limits: &[(&str, u8)]) -> Vec<&'static str> {
    let app = chain(limits).spawn().await;
    for (at, agent) in CHAIN.into_iter().enumerate() {
        app.provider.always(agent, move |seen| {
            match CHAIN.get(at + 1) {
                Some(next) if seen.tool_names().contains(&"call_agent".to_owned()) => {
                    if seen.tool_results().is_empty() {
                        delegates([(next, "go on")])
                    } else {
                        says("done")
                    }
                }
                // No tool was offered, so the call is ignored and the text is final.
                Some(next) => delegates([(next, "go on")]).with_text("as deep as I may"),
                None => says("bottom"),
            }
        });
    }

    let run = app.run("a", "go").await;

    assert_eq!(run.output(), "done");
    let reached: Vec<_> = CHAIN
        .into_iter()
        .filter(|agent| !app.provider.requests_for(agent).is_empty())
        .collect();
    let deepest = reached.last().expect("a itself");
    let sent = app.provider.wait_for_request(deepest, 1).await;
    assert!(sent.body.get("tools").is_none(), "{:?}", sent.body);
    assert_eq!(run["tree"]["runs"], reached.len());
    reached
}

#[tokio::test]
async fn the_default_depth_is_three_levels() {
    assert_eq!(reached(&[]).await, ["a", "b", "c", "d"]);
}

#[tokio::test]
async fn the_roots_depth_limit_applies_to_the_tree() {
    assert_eq!(reached(&[("a", 1), ("b", 5)]).await, ["a", "b"]);
}

#[tokio::test]
async fn five_is_the_deepest_level_and_an_unset_limit_has_no_effect() {
    let all = ["a", "b", "c", "d", "e", "f"];
    assert_eq!(reached(&[("a", 5)]).await, all);
}

#[tokio::test]
async fn a_child_tightens_its_own_subtree() {
    assert_eq!(reached(&[("a", 5), ("b", 1)]).await, ["a", "b", "c"]);
}

#[tokio::test]
async fn a_dry_run_shows_the_limit() {
    let app = chain(&[("a", 2)]).spawn().await;
    let dry = app.post("/agents/a/dry-run", &serde_json::json!({})).await;
    assert_eq!(dry.status, 200, "{}", dry.text);
    assert_eq!(dry.json()["sub_agents"]["max_depth"], 2, "{}", dry.text);
}
