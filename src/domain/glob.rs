//! Untrusted globs. `globset` panics if the regular expression of a glob is rejected, and recurses for each nested
//! brace. Here, a glob that exceeds the bounds is an error.

use std::path::Path;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// The most opening braces of a glob. Lower than regex's limit of nesting, and safe for a thread's stack.
const MAX_BRACES: usize = 50;

/// One or more compiled globs.
#[derive(Clone, Debug)]
pub struct Matcher(GlobSet);

impl Matcher {
    /// A glob over paths: only `**` matches a `/`.
    ///
    /// # Errors
    /// What is wrong with the glob; does not repeat the glob.
    pub fn for_paths(glob: &str) -> Result<Self, String> {
        let mut set = GlobSetBuilder::new();
        add(&mut set, glob, true)?;
        build(&set)
    }

    /// Globs over names, of which at least one has to match.
    ///
    /// # Errors
    /// The first invalid glob and the reason.
    pub fn for_names(globs: &[String]) -> Result<Self, String> {
        let mut set = GlobSetBuilder::new();
        for glob in globs {
            add(&mut set, glob, false)
                .map_err(|why| format!("has an invalid glob pattern {glob:?}: {why}"))?;
        }
        build(&set)
    }

    /// Whether one of the globs matches the whole path.
    pub fn is_match(&self, path: impl AsRef<Path>) -> bool {
        self.0.is_match(path)
    }
}

/// Rejects a glob with too many braces.
pub fn check_braces(glob: &str) -> Result<(), String> {
    match glob.bytes().filter(|byte| *byte == b'{').count() {
        0..=MAX_BRACES => Ok(()),
        _ => Err(format!("it has more than {MAX_BRACES} braces")),
    }
}

fn add(set: &mut GlobSetBuilder, glob: &str, has_separators: bool) -> Result<(), String> {
    check_braces(glob)?;
    let built = GlobBuilder::new(glob)
        .literal_separator(has_separators)
        .build();
    set.add(built.map_err(|error| error.kind().to_string())?);
    Ok(())
}

/// A set returns an error where the matcher of a single glob panics.
fn build(set: &GlobSetBuilder) -> Result<Matcher, String> {
    let built = set.build().map_err(|error| error.kind().to_string())?;
    Ok(Matcher(built))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Matcher;

    #[test]
    fn nested_braces_are_an_error_and_neither_a_panic_nor_an_overflow() {
        for depth in [51, 300, 100_000] {
            let glob = format!("{}a{}", "{".repeat(depth), "}".repeat(depth));
            let why = Matcher::for_paths(&glob).expect_err("too many");
            assert_eq!(why, "it has more than 50 braces");
            assert!(Matcher::for_names(&[glob]).is_err());
        }
        let nested = format!("{}a{}", "{".repeat(50), "}".repeat(50));
        assert!(Matcher::for_paths(&nested).expect("a glob").is_match("a"));
    }

    #[test]
    fn a_slash_is_matched_in_names_only() {
        let paths = Matcher::for_paths("a*").expect("a glob");
        assert!(paths.is_match("ab") && !paths.is_match("a/b"));
        let names = Matcher::for_names(&["x".to_owned(), "a*".to_owned()]).expect("globs");
        assert!(names.is_match("a/b") && names.is_match("x") && !names.is_match("b"));
    }

    proptest! {
        #[test]
        fn any_text_is_a_glob_or_an_error(glob in r"([*?\[\]{}!^,/\\a-ce\u{e9}\u{20ac}\u{10ffff}-]|\PC){0,60}") {
            let _ = Matcher::for_paths(&glob).map(|it| it.is_match("a/b"));
            let _ = Matcher::for_names(&[glob]).map(|it| it.is_match("ab"));
        }
    }
}
