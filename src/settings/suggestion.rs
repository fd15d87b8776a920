//! "Did you mean": finds the known name closest to a mistyped one.

/// Longer names are not compared: the cost is the product of both lengths, and clients choose one of them.
const MAX_NAME: usize = 80;

/// The known name that is closest to `typed`, ignoring case; `None` if none is close, or if `typed` is itself known.
pub fn closest<'k>(typed: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    if typed.len() > MAX_NAME {
        return None;
    }
    let lowercase = typed.to_lowercase();
    known
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(&lowercase, name), name))
        .min()
        .filter(|(distance, name)| *name != typed && *distance <= name.chars().count().div_ceil(3))
        .map(|(_, name)| name)
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
    }
}
