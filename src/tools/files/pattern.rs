//! Compiles the search patterns of models within bounds, so that the clock is checked at least about every two seconds.

use std::path::Path;

use grep_regex::{RegexMatcher, RegexMatcherBuilder};

use crate::domain::glob;
use crate::domain::message::shorten;

const MAX_REGEX: usize = 4000;
const MAX_GLOB: usize = 1000;
/// Most bytes of the automaton that a search builds while it runs.
const MAX_CACHE: usize = 10 << 20;
/// Most bytes of a compiled expression, and the longest line that it is matched against. Matching takes time in
/// proportion to their product, at worst 5e-11 s for each byte pair; the classes keep that below about 2 seconds.
const SIZE_CLASSES: [(usize, usize); 5] = [
    (2 << 10, 16 << 20),
    (16 << 10, 2 << 20),
    (128 << 10, 256 << 10),
    (1 << 20, 32 << 10),
    (4 << 20, 8 << 10),
];

/// A regular expression whose search time is bounded.
#[derive(Debug)]
pub struct BoundedRegex {
    pub matcher: RegexMatcher,
    /// Longer lines are not matched.
    pub max_line: usize,
}

impl BoundedRegex {
    /// Compiles the `pattern` argument of a search.
    ///
    /// # Errors
    /// The pattern is invalid or too large. The text is for the model.
    pub fn new(pattern: &str) -> Result<Self, String> {
        if pattern.len() > MAX_REGEX {
            return Err(too_long("pattern", pattern, MAX_REGEX));
        }
        let mut last_error = String::new();
        for (max_compiled, max_line) in SIZE_CLASSES {
            let mut builder = RegexMatcherBuilder::new();
            builder
                .line_terminator(Some(b'\n'))
                .size_limit(max_compiled)
                .dfa_size_limit(MAX_CACHE);
            match builder.build(pattern) {
                Ok(matcher) => return Ok(Self { matcher, max_line }),
                Err(error) => last_error = error.to_string(),
            }
        }
        Err(format!(
            "the pattern cannot be used: {}",
            shorten(&last_error, 1000)
        ))
    }
}

/// Compiles a glob over paths. `argument` names it in errors.
///
/// # Errors
/// The glob is invalid or too long. The text is for the model.
pub fn compile_glob(argument: &str, text: &str) -> Result<glob::Matcher, String> {
    if text.len() > MAX_GLOB {
        return Err(too_long(argument, text, MAX_GLOB));
    }
    let built = glob::Matcher::for_paths(text);
    built.map_err(|why| format!("{argument} is not a glob: {}", shorten(&why, 300)))
}

fn too_long(argument: &str, text: &str, max: usize) -> String {
    format!(
        "{argument} has {} bytes, and at most {max} are allowed",
        text.len()
    )
}

/// Selects the files that are searched.
#[derive(Debug)]
pub struct IncludeFilter(Option<(glob::Matcher, bool)>);

impl IncludeFilter {
    /// Parses `include`: a glob over names, or over paths if it contains a slash. An empty one selects all files.
    ///
    /// # Errors
    /// The glob is invalid or too long. The text is for the model.
    pub fn new(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        let text = text.strip_prefix("./").unwrap_or(text);
        let matcher = compile_glob("include", text)?;
        Ok(Self(Some((matcher, text.contains('/')))))
    }

    pub fn is_match(&self, path: &Path) -> bool {
        match &self.0 {
            None => true,
            Some((glob, true)) => glob.is_match(path),
            Some((glob, false)) => path.file_name().is_some_and(|name| glob.is_match(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::BoundedRegex;

    #[test]
    fn larger_patterns_match_shorter_lines() {
        for (pattern, max_line) in [
            ("todo|fixme", 16 << 20),
            (r"^\s*fn \w+\(", 256 << 10),
            (r"\w{3,20}@", 32 << 10),
            (r"(x|.)*x[a-y]{400}z", 256 << 10),
        ] {
            let regex = BoundedRegex::new(pattern).expect(pattern);
            assert_eq!(regex.max_line, max_line, "{pattern}");
        }
    }

    #[test]
    fn a_pattern_that_is_too_large_is_rejected() {
        let long = BoundedRegex::new(&"a".repeat(4001)).expect_err("too long");
        assert_eq!(long, "pattern has 4001 bytes, and at most 4000 are allowed");
        let nested = format!("{}a{}", "(".repeat(1900), ")".repeat(1900));
        for large in [r"\w{1000}", "((((a{99}){99}){99}){99}){99}", &nested] {
            let why = BoundedRegex::new(large).expect_err("too large");
            assert!(why.starts_with("the pattern cannot be used: "), "{why}");
        }
    }
}
