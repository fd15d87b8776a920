//! The path of a run in its tree: the agent of the root, then `/<turn>.<position>:<agent>` for each call that leads to
//! the run. It does not depend on the order in which runs start or end.

/// The path of a child. `position` is that of its call in the reply, from 1.
pub fn child(parent: &str, turn: u32, position: usize, agent: &str) -> String {
    format!("{parent}/{turn}.{position}:{agent}")
}

/// The calls that lead to the run, as turn and position. Sorts runs in the order of their calls.
pub fn calls(path: &str) -> Vec<(u32, usize)> {
    let parts = path.split('/').skip(1);
    let call = |part: &str| {
        let (turn, position) = part.split_once(':')?.0.split_once('.')?;
        Some((turn.parse().ok()?, position.parse().ok()?))
    };
    parts.map(|part| call(part).unwrap_or_default()).collect()
}

/// The agent of the run.
pub fn agent(path: &str) -> &str {
    let last = path.rsplit('/').next().unwrap_or_default();
    last.split_once(':').map_or(last, |(_, agent)| agent)
}

#[cfg(test)]
mod tests {
    use super::{agent, calls, child};

    #[test]
    fn a_path_names_the_calls_and_the_agents() {
        let path = child(&child("planner", 1, 2, "writer"), 3, 1, "critic");
        assert_eq!(path, "planner/1.2:writer/3.1:critic");
        assert_eq!(calls(&path), [(1, 2), (3, 1)]);
        assert_eq!((agent(&path), agent("planner")), ("critic", "planner"));
    }
}
