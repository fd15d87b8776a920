//! The names under which services offer a model: with dates, regions, versions and makers. Pure.

/// The makers of models as Bedrock puts them before a model's name.
const MAKERS: [&str; 6] = [
    "anthropic.",
    "openai.",
    "google.",
    "xai.",
    "mistral.",
    "deepseek.",
];

/// The name without what services add to it: `us.anthropic.claude-opus-5-5-v1:0`, `anthropic/claude-opus-5.5:batch` and
/// `claude-opus-5-5@20261001` are all `claude-opus-5-5`. Dots become dashes.
pub fn canonical(model: &str) -> String {
    let lower = model.to_ascii_lowercase();
    let name = lower.strip_prefix("ft:").unwrap_or(&lower);
    let name = name.rsplit('/').next().unwrap_or_default();
    let name = name.split(['@', ':']).next().unwrap_or_default();
    let name = without_maker(name);
    let name = name.strip_prefix("databricks-").unwrap_or(name);
    let name = strip_version(name);
    let name = strip_date_suffix(name).unwrap_or(name).replace('.', "-");
    match Claude::parse(&name) {
        Some(claude) => claude.name(),
        None => name,
    }
}

/// Without `us.anthropic.` at the start.
fn without_maker(name: &str) -> &str {
    let after = |maker: &&str| {
        let at = name.find(maker)?;
        let is_whole = at == 0 || name[..at].ends_with('.');
        is_whole.then(|| &name[at + maker.len()..])
    };
    MAKERS.iter().find_map(after).unwrap_or(name)
}

/// Without `-v1` at the end.
fn strip_version(name: &str) -> &str {
    match name.rsplit_once("-v") {
        Some((rest, version)) if is_number(version) => rest,
        _ => name,
    }
}

/// The name without `-20250929`, `-2025-04-14` or `-latest` at the end.
pub fn strip_date_suffix(model: &str) -> Option<&str> {
    let is_date = |end: &str, pattern: &str| {
        let is_match = |(c, expected): (char, char)| match expected {
            '9' => c.is_ascii_digit(),
            other => c == other,
        };
        end.len() == pattern.len() && end.chars().zip(pattern.chars()).all(is_match)
    };
    let dated = ["-99999999", "-9999-99-99"]
        .into_iter()
        .find_map(|pattern| {
            let (name, end) = model.split_at_checked(model.len().checked_sub(pattern.len())?)?;
            is_date(end, pattern).then_some(name)
        });
    dated.or_else(|| model.strip_suffix("-latest"))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A model of Anthropic, by the parts of its name.
#[derive(Debug, PartialEq, Eq)]
pub struct Claude<'a> {
    /// `opus`
    pub family: &'a str,
    /// Compares as versions do.
    pub version: Vec<u32>,
}

impl<'a> Claude<'a> {
    /// `None` if the name is not one of Anthropic's, or names no family.
    pub fn parse(name: &'a str) -> Option<Self> {
        let parts = name.strip_prefix("claude-")?.split('-');
        let is_word = |part: &&str| part.starts_with(|c: char| c.is_ascii_alphabetic());
        let family = parts.clone().find(is_word)?;
        // Longer numbers are dates.
        let numbers = parts.filter(|part| is_number(part) && part.len() < 3);
        let mut version: Vec<u32> = numbers.filter_map(|part| part.parse().ok()).collect();
        if version.len() > 1 && version.last() == Some(&0) {
            version.pop();
        }
        Some(Self { family, version })
    }

    fn name(&self) -> String {
        let mut name = format!("claude-{}", self.family);
        for number in &self.version {
            name.push_str(&format!("-{number}"));
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn a_model_has_one_name_wherever_it_is_served() {
        for (served, name) in [
            ("claude-opus-5-5", "claude-opus-5-5"),
            ("claude-opus-5-5-20261001", "claude-opus-5-5"),
            (
                "us.anthropic.claude-opus-5-5-20261001-v1:0",
                "claude-opus-5-5",
            ),
            ("anthropic.claude-opus-5-5", "claude-opus-5-5"),
            ("global.anthropic.claude-opus-5-5-v1", "claude-opus-5-5"),
            (
                "arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude-opus-5-5-v1:0",
                "claude-opus-5-5",
            ),
            ("anthropic/claude-opus-5.5:batch", "claude-opus-5-5"),
            ("anthropic/claude-4.5-sonnet-20250929", "claude-sonnet-4-5"),
            ("claude-3-5-sonnet-latest", "claude-sonnet-3-5"),
            ("claude-opus-4-0", "claude-opus-4"),
            ("claude-opus-5-5@default", "claude-opus-5-5"),
            (
                "publishers/anthropic/models/claude-opus-5-5@20261001",
                "claude-opus-5-5",
            ),
            ("databricks-gpt-6-1-sol", "gpt-6-1-sol"),
            ("gpt-6.1-sol-2026-09-29", "gpt-6-1-sol"),
            ("us.openai.gpt-6-sol", "gpt-6-sol"),
            ("GPT-6-Sol", "gpt-6-sol"),
            ("ft:gpt-6-sol:team::x", "gpt-6-sol"),
            ("google/gemini-4-hydrogen", "gemini-4-hydrogen"),
            ("models/gemini-4-hydrogen", "gemini-4-hydrogen"),
            ("claude", "claude"),
            ("", ""),
            ("é-2025", "é-2025"),
        ] {
            assert_eq!(canonical(served), name, "{served}");
        }
    }
}
