//! "Did you mean": finds the known name closest to a mistyped one.

use std::path::Path;

/// Longer names are not compared: the cost is the product of both lengths, and clients choose one of them.
const MAX_NAME: usize = 80;
/// Names of a directory that a mistyped one is compared with.
const MAX_FILES: usize = 10_000;

/// The known name that is closest to `typed`, ignoring case; `None` if none is close, or if `typed` is itself known.
pub fn closest<'k>(typed: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    if typed.len() > MAX_NAME {
        return None;
    }
    let lowercase = typed.to_lowercase();
    known
        .into_iter()
        .map(|name| {
            let distance = strsim::damerau_levenshtein(&lowercase, &name.to_lowercase());
            (distance, name)
        })
        .min()
        .filter(|(distance, name)| *name != typed && *distance <= name.chars().count().div_ceil(3))
        .map(|(_, name)| name)
}

/// A question that names the known name closest to a mistyped one; `None` if none is close.
pub fn did_you_mean<'k>(typed: &str, known: impl IntoIterator<Item = &'k str>) -> Option<String> {
    closest(typed, known).map(|name| format!("did you mean {name:?}?"))
}

/// The same for the path of a file that does not exist, by the names in its directory.
pub fn similar_file(path: &Path) -> Option<String> {
    let typed = path.file_name()?.to_str()?;
    let dir = path.parent()?;
    let listed = match dir.as_os_str().is_empty() {
        true => Path::new(".").read_dir(),
        false => dir.read_dir(),
    };
    let entries = listed.ok()?.take(MAX_FILES).filter_map(Result::ok);
    let names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let name = closest(typed, names.iter().map(String::as_str))?;
    Some(format!("did you mean {:?}?", dir.join(name)))
}

/// A hint behind what is wrong; empty without one.
pub fn clause(hint: Option<String>) -> String {
    hint.map_or_else(String::new, |hint| format!("; {hint}"))
}

#[cfg(test)]
mod tests {
    use super::closest;

    #[test]
    fn the_closest_name_is_suggested() {
        let known = ["input", "labels", "model", "name"];
        for (typed, expected) in [
            ("inptu", Some("input")),
            ("modle", Some("model")),
            ("NAME", Some("name")),
            ("model", None),
            ("temperature", None),
            (&"m".repeat(100_000), None),
        ] {
            assert_eq!(closest(typed, known), expected);
        }
        assert_eq!(closest("readme.mkd", ["README.md"]), Some("README.md"));
    }
}
