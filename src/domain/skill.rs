//! Agent skills (agentskills.io): directories with a `SKILL.md` of front matter and instructions. Only their format.

use std::path::Path;

use serde_json::Value;

use crate::domain::yaml;

/// The tool that reads skills.
pub const READ_SKILL: &str = "read_skill";
/// The file of a skill's instructions.
pub const SKILL_FILE: &str = "SKILL.md";
/// The most skills of one agent.
pub const MAX_SKILLS: usize = 64;

/// The longest front matter, in bytes.
const MAX_FRONT_MATTER: usize = 64 << 10;
const MAX_NAME: usize = 64;
const MAX_DESCRIPTION: usize = 1024;
const MAX_COMPATIBILITY: usize = 500;
/// The fields of the format.
const FIELDS: [&str; 6] = [
    "allowed-tools",
    "compatibility",
    "description",
    "license",
    "metadata",
    "name",
];

/// What a `SKILL.md` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skill<'t> {
    /// On one line.
    pub description: String,
    /// The environment that it needs, on one line.
    pub compatibility: Option<String>,
    /// The instructions.
    pub body: &'t str,
    /// What differs from the format, but prevents no use: `<line>: <text>`.
    pub deviations: Vec<String>,
}

impl<'t> Skill<'t> {
    /// Reads the text of the `SKILL.md` in a directory with this name.
    ///
    /// # Errors
    /// `<line>: <text>`.
    pub fn parse(directory: &str, text: &'t str) -> Result<Self, String> {
        let (front_matter, body) = split(text)?;
        if front_matter.len() > MAX_FRONT_MATTER {
            return Err(format!(
                "1: the front matter has over {MAX_FRONT_MATTER} bytes; long texts belong after it"
            ));
        }
        let value = yaml::parse(front_matter)
            .map_err(|error| format!("{}: {}", error.line + 1, error.text))?;
        let lines = yaml::key_lines(front_matter);
        let line = |key: &str| lines.get(key).map_or(1, |line| line + 1);
        if !value.is_object() {
            return Err("1: the front matter must have name: and description:".to_owned());
        }
        let text_of = |key: &str| match value.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.trim())),
            Some(_) => Err(format!("{}: {key} must be a text", line(key))),
        };
        let description = text_of("description")?.unwrap_or_default();
        if description.is_empty() {
            return Err(format!(
                "{}: description is required: models choose skills by it",
                line("description")
            ));
        }
        let compatibility = text_of("compatibility")?;
        let name = text_of("name")?;
        let mut deviations = Vec::new();
        match name {
            None => deviations.push("1: name is required".to_owned()),
            Some(name) if name == directory => {}
            Some(name) => deviations.push(format!(
                "{}: name is \"{name}\", but the directory makes it \"{directory}\"",
                line("name")
            )),
        }
        for (key, text, max) in [
            ("description", Some(description), MAX_DESCRIPTION),
            ("compatibility", compatibility, MAX_COMPATIBILITY),
        ] {
            let length = text.map_or(0, |text| text.chars().count());
            if length > max {
                let line = line(key);
                deviations.push(format!("{line}: {key} has {length} characters, over {max}"));
            }
        }
        for key in ["license", "allowed-tools"] {
            deviations.extend(text_of(key).err());
        }
        let is_text_map = |value: &Value| {
            let fields = value.as_object();
            fields.is_some_and(|fields| fields.values().all(Value::is_string))
        };
        if value.get("metadata").is_some_and(|it| !is_text_map(it)) {
            let line = line("metadata");
            deviations.push(format!("{line}: metadata must be a map of texts"));
        }
        let fields = value.as_object().into_iter().flatten();
        let unknown = fields.filter(|(key, _)| !FIELDS.contains(&key.as_str()));
        deviations.extend(unknown.map(|(key, _)| {
            let line = line(key);
            format!("{line}: {key} is no field of a skill; its place is metadata")
        }));
        Ok(Self {
            description: one_line(description, MAX_DESCRIPTION),
            compatibility: compatibility.map(|text| one_line(text, MAX_COMPATIBILITY)),
            body,
            deviations,
        })
    }
}

/// The name of the skill in a directory: the directory's own.
///
/// # Errors
/// A sentence about the entry of an agent's file.
pub fn name_of(entry: &str) -> Result<&str, String> {
    let name = Path::new(entry).file_name().and_then(|name| name.to_str());
    let name = name.unwrap_or_default();
    if name == SKILL_FILE {
        return Err(format!(
            "skills names \"{entry}\": name the directory, without {SKILL_FILE}"
        ));
    }
    let is_part = |c: char| c.is_alphanumeric() && !c.is_uppercase();
    let is_valid = (1..=MAX_NAME).contains(&name.chars().count())
        && name.split('-').all(|part| !part.is_empty())
        && name.chars().all(|c| c == '-' || is_part(c));
    match is_valid {
        true => Ok(name),
        false => Err(format!(
            "skills names \"{entry}\": a skill's directory has a name of up to {MAX_NAME} lowercase letters and digits, with \
             single hyphens between them"
        )),
    }
}

/// The front matter and the body.
fn split(text: &str) -> Result<(&str, &str), String> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let is_fence = |line: &str| line.trim_end() == "---";
    let mut lines = text.split_inclusive('\n');
    let first = lines.next().unwrap_or_default();
    if !is_fence(first) {
        return Err("1: must begin with --- and the front matter (name:, description:)".to_owned());
    }
    let mut end = first.len();
    for line in lines {
        if is_fence(line) {
            let body = &text[end + line.len()..];
            return Ok((&text[first.len()..end], body.trim_matches(['\n', '\r'])));
        }
        end += line.len();
    }
    Err("1: the front matter has no end: a line with ---".to_owned())
}

fn one_line(text: &str, max: usize) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(max).collect()
}

#[cfg(test)]
mod tests {
    use super::{Skill, name_of};

    #[test]
    fn skills_are_read_as_the_format_has_them() {
        let text = "---\nname: pdf-forms\ndescription: >\n  Fills forms.\n  Use it for PDFs.\nlicense: MIT\n\
                    compatibility: Requires qpdf\nmetadata:\n  version: \"1.0\"\nallowed-tools: Bash(git:*) Read\n---\n\n# Forms\n---\nx\n";
        let skill = Skill::parse("pdf-forms", text).expect("a skill");
        assert_eq!(skill.description, "Fills forms. Use it for PDFs.");
        assert_eq!(skill.compatibility.as_deref(), Some("Requires qpdf"));
        assert_eq!(skill.body, "# Forms\n---\nx");
        assert_eq!(skill.deviations, [""; 0]);
        let crlf = Skill::parse("a", "\u{feff}---\r\nname: a\r\ndescription: b\r\n---\r\nc");
        assert_eq!(crlf.expect("a skill").body, "c");
    }

    #[test]
    fn deviations_name_their_line() {
        let text = "---\nname: Forms\ndescription: x\nversion: 2\nmetadata: [1]\nlicense: 3\n---\n";
        let skill = Skill::parse("forms", text).expect("a skill");
        assert_eq!(
            skill.deviations,
            [
                "2: name is \"Forms\", but the directory makes it \"forms\"",
                "6: license must be a text",
                "5: metadata must be a map of texts",
                "4: version is no field of a skill; its place is metadata",
            ]
        );
    }

    #[test]
    fn errors_name_their_line() {
        let long = format!("---\ndescription: {}\n---\n", "x".repeat(64 << 10));
        for (text, expected) in [
            (long.as_str(), "1: the front matter has over 65536 bytes"),
            ("# Forms", "1: must begin with ---"),
            ("---\nname: a\n", "1: the front matter has no end"),
            ("---\nname: a\n---\n", "1: description is required"),
            (
                "---\nname: a\ndescription: \" \"\n---\n",
                "3: description is required",
            ),
            (
                "---\ndescription: [a]\n---\n",
                "2: description must be a text",
            ),
            ("---\nname: a\ndescription: b: c\n---\n", "3: "),
            ("---\n- a\n---\n", "1: the front matter must have"),
        ] {
            let error = Skill::parse("a", text).expect_err(text);
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[test]
    fn names_are_those_of_directories() {
        for entry in ["pdf", "a-1", "../shared/pdf-forms", "/srv/x/", "~/é"] {
            assert!(name_of(entry).is_ok(), "{entry}");
        }
        let long = "a".repeat(65);
        for entry in [
            "",
            "PDF",
            "-a",
            "a-",
            "a--b",
            "a_b",
            "x/..",
            "x/SKILL.md",
            &long,
        ] {
            assert!(name_of(entry).is_err(), "{entry}");
        }
    }
}
