//! Builds the system prompt (instructions, skill, context files, memory) and the user message. Blocking I/O with
//! limits.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::context_files::{self, ContextFile, ContextFiles};
use crate::catalog::skills;
use crate::config::environment::home_dir;
use crate::domain::agent::client_additions::ClientAdditions;
use crate::domain::content::Content;
use crate::settings::kinds::expand_home;
use crate::workdirs::registry::Workdirs;
use crate::workdirs::workdir::Workdir;

/// Separates the parts of a system prompt.
const SECTION_SEPARATOR: &str = "\n\n---\n\n";
const MEMORY_HEADING: &str = "## Memory";
const INSTRUCTIONS_HEADING: &str = "## Instructions";
/// The input of a run whose request has none.
pub const DEFAULT_INPUT: &str = "Execute the task described in your instructions.";

/// The inputs of a system prompt.
#[derive(Clone, Debug)]
pub struct PromptParts<'a> {
    /// The agent's name, for error messages.
    pub agent: &'a str,
    pub system_prompt: &'a str,
    /// A path or a bare name.
    pub skill: Option<&'a str>,
    /// The directories of skills, as in the agent's file.
    pub skills: &'a [String],
    pub workdirs: &'a Workdirs,
    /// Globs of context files.
    pub files: &'a [String],
    /// Whether a request names the skill, which then has to lie in a root.
    pub is_skill_requested: bool,
    /// The directory of the globs; `None` if there are no globs.
    pub workdir: Option<Arc<Workdir>>,
    /// The base of relative paths and bare names of skills.
    pub config_dir: &'a Path,
    /// Maximum size of all context files in bytes.
    pub max_file_bytes: usize,
    /// The rendered memory entries; blank means none.
    pub memory: &'a str,
}

/// The contract fixes these texts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// The skill is missing or unreadable.
    #[error("failed to load skill for agent \"{agent}\": {why}")]
    Skill {
        agent: String,
        /// `skill not found: <path>`, or the reason why it could not be read.
        why: String,
    },
    /// A glob is invalid, or the files are too large in total.
    #[error("failed to resolve files for agent \"{agent}\": {why}")]
    Files { agent: String, why: String },
    /// The workdir is not a directory.
    #[error("invalid workdir for agent \"{agent}\": {why}")]
    Workdir { agent: String, why: String },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemPrompt {
    /// Empty if every part is empty.
    pub text: String,
    /// Context files that are not in it, and why.
    pub omissions: Vec<String>,
}

pub fn system_prompt(parts: &PromptParts<'_>) -> Result<SystemPrompt, PromptError> {
    let mut sections = vec![parts.system_prompt.to_owned()];
    if let Some(skill) = parts.skill {
        let path = skill_path(skill, parts.config_dir);
        let text = match parts.is_skill_requested {
            true => read_requested_skill(&path, parts.workdirs, parts.max_file_bytes),
            false => read_skill(&path, parts.workdirs, parts.max_file_bytes),
        };
        let text = text.map_err(|why| PromptError::Skill {
            agent: parts.agent.to_owned(),
            why,
        })?;
        sections.push(section("## Skill", text.trim_end_matches(['\n', '\r'])));
    }
    sections.push(section("## Skills", &list_skills(parts)?));
    let files = match &parts.workdir {
        Some(workdir) => context_files::collect(parts.files, workdir, parts.max_file_bytes),
        None => Ok(ContextFiles::default()),
    };
    let ContextFiles { files, omissions } = files.map_err(|why| PromptError::Files {
        agent: parts.agent.to_owned(),
        why,
    })?;
    let blocks: Vec<String> = files.iter().map(file_block).collect();
    sections.push(section("## Context Files", &blocks.join("\n\n")));
    sections.push(section(MEMORY_HEADING, parts.memory));
    sections.retain(|section| !section.trim().is_empty());
    Ok(SystemPrompt {
        text: sections.join(SECTION_SEPARATOR),
        omissions,
    })
}

/// The skills that the model may read; empty if there are none.
fn list_skills(parts: &PromptParts<'_>) -> Result<String, PromptError> {
    if parts.skills.is_empty() {
        return Ok(String::new());
    }
    let entries = parts.skills.iter();
    let read = entries.map(|it| skills::read(it, parts.config_dir, parts.workdirs));
    let read: Result<Vec<_>, String> = read.collect();
    let read = read.map_err(|why| PromptError::Skill {
        agent: parts.agent.to_owned(),
        why,
    })?;
    Ok(skills::list(&read))
}

/// The prompt with what the client of the run adds to it.
pub fn append_instructions(prompt: String, client: Option<&ClientAdditions>) -> String {
    match instructions_section(client) {
        None => prompt,
        Some(section) if prompt.is_empty() => section,
        Some(section) => format!("{}\n\n{section}", prompt.trim_end()),
    }
}

fn instructions_section(client: Option<&ClientAdditions>) -> Option<String> {
    let instructions = client?.instructions.as_deref()?;
    Some(format!("{INSTRUCTIONS_HEADING}\n\n{instructions}"))
}

/// Splits a system prompt into what is not the agent's memory, and the memory; `None` if it has none. The instructions of the
/// run's client, which follow the memory, are not a part of it.
pub fn split_memory(system: &str, client: Option<&ClientAdditions>) -> Option<(String, String)> {
    let section = instructions_section(client);
    let own = section.and_then(|it| system.strip_suffix(it.as_str())?.strip_suffix("\n\n"));
    let prompt = own.unwrap_or(system);
    let heading = format!("{MEMORY_HEADING}\n\n");
    let split = prompt.rsplit_once(&format!("{SECTION_SEPARATOR}{heading}"));
    let (before, memory) = split.or_else(|| Some(("", prompt.strip_prefix(&heading)?)))?;
    let before = before.to_owned();
    let rest = match own {
        Some(_) => append_instructions(before, client),
        None => before,
    };
    Some((rest, memory.to_owned()))
}

/// The absolute path of `own` (from the definition), or else of the daemon's directory.
pub fn workdir(agent: &str, configured: Option<&Path>) -> Result<PathBuf, PromptError> {
    let invalid = |why: String| PromptError::Workdir {
        agent: agent.to_owned(),
        why,
    };
    let dir = configured.unwrap_or(Path::new("."));
    let display_path = dir.display();
    match fs::metadata(dir) {
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => return Err(invalid(format!("{display_path} is not a directory"))),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(invalid(format!("{display_path} does not exist")));
        }
        Err(error) => return Err(invalid(format!("could not open {display_path}: {error}"))),
    }
    // Components drop the dot at the end of a bare ".".
    let absolute = std::path::absolute(dir).map_err(|error| invalid(error.to_string()))?;
    Ok(absolute.components().collect())
}

/// The path of a skill's file: absolute, below `~`, relative to the config directory, or `skills/<name>/SKILL.md` for
/// a bare name.
pub fn skill_path(skill: &str, config_dir: &Path) -> PathBuf {
    match skill.contains('/') {
        true => config_dir.join(expand_home(skill, home_dir().as_deref())),
        false => config_dir.join("skills").join(skill).join("SKILL.md"),
    }
}

/// A root's user message: the input, or the default if it is blank, followed by the context.
pub fn root_message(input: Option<Content>, context: Option<&str>) -> Content {
    let input = input.filter(|input| !input.is_blank());
    let mut message = input.unwrap_or_else(|| Content::from(DEFAULT_INPUT));
    if let Some(context) = context.filter(|context| !context.trim().is_empty()) {
        message.append(&format!("Context:\n{context}"));
    }
    message
}

/// A child's user message.
pub fn child_message(task: &str, context: Option<&str>) -> String {
    let message = format!("Task: {task}");
    match context.filter(|context| !context.trim().is_empty()) {
        Some(context) => format!("{message}\n\nContext:\n{context}"),
        None => message,
    }
}

/// A section of the prompt; empty if it has no content.
fn section(heading: &str, text: &str) -> String {
    match text.trim().is_empty() {
        true => String::new(),
        false => format!("{heading}\n\n{text}"),
    }
}

/// Formats a context file for the prompt.
fn file_block(file: &ContextFile) -> String {
    let extension = Path::new(&file.path).extension().unwrap_or_default();
    let extension = extension.to_string_lossy();
    // The info string of a fence must not end its line.
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '+' | '-' | '_' | '#');
    let language = match extension.chars().all(is_plain) {
        true => &*extension,
        false => "",
    };
    let path = file.path.replace(char::is_control, "\u{fffd}");
    let fence = fence(&file.text);
    format!("### {path}\n{fence}{language}\n{}\n{fence}", file.text)
}

/// Three backticks, or one more than the longest run at the start of a line: a file must not close its own block and
/// pose as the prompt.
fn fence(text: &str) -> String {
    let run = |line: &str| {
        let line = line.trim_start();
        line.len() - line.trim_start_matches('`').len()
    };
    let longest = text.lines().map(run).max().unwrap_or(0);
    "`".repeat(if longest >= 3 { longest + 1 } else { 3 })
}

fn read_skill(path: &Path, workdirs: &Workdirs, max_bytes: usize) -> Result<String, String> {
    let display_path = path.display();
    let unreadable = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            format!("skill not found: {display_path}")
        }
        _ => format!("could not read skill {display_path}: {error}"),
    };
    let file = workdirs.open_skill_file(path).map_err(unreadable)?;
    skill_text(&display_path.to_string(), file, max_bytes)
}

/// Opens a skill that a request names: below a root, without links, and not one of the daemon's own files.
fn read_requested_skill(
    path: &Path,
    workdirs: &Workdirs,
    max_bytes: usize,
) -> Result<String, String> {
    let display_path = path.display().to_string();
    match workdirs.open_file(path) {
        Ok(file) => skill_text(&display_path, file, max_bytes),
        Err(why) => Err(format!("skill {display_path} {why}")),
    }
}

fn skill_text(display_path: &str, file: impl Read, max_bytes: usize) -> Result<String, String> {
    let mut bytes = Vec::new();
    file.take(max_bytes as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("could not read skill {display_path}: {error}"))?;
    if bytes.len() > max_bytes {
        return Err(format!(
            "skill {display_path} is larger than the {max_bytes} bytes that limits.context_files allows"
        ));
    }
    String::from_utf8(bytes).map_err(|_| format!("skill {display_path} is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use crate::workdirs::registry::Workdirs;
    use crate::workdirs::reserved::ReservedPaths;

    use crate::domain::content::Content;

    use super::{
        PromptParts, SystemPrompt, append_instructions, child_message, root_message, skill_path,
        split_memory, system_prompt, workdir,
    };
    use crate::domain::agent::client_additions::ClientAdditions;

    #[test]
    fn the_prompt_has_these_bytes() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path();
        fs::create_dir_all(root.join("skills/review")).expect("a directory");
        fs::write(root.join("skills/review/SKILL.md"), "Be kind.\n\n").expect("a file");
        fs::write(root.join("b.md"), "# B\n```sh\nls\n```\n").expect("a file");
        fs::write(root.join("a.rs"), "fn main() {}\n").expect("a file");
        fs::write(root.join("Makefile"), "all:\n").expect("a file");
        let files = ["*".to_owned()];
        let workdirs = Workdirs::new(root.to_owned(), &[], ReservedPaths::default());
        let all_parts = PromptParts {
            agent: "x",
            system_prompt: "You review.",
            skill: Some("review"),
            skills: &[],
            workdirs: &workdirs,
            files: &files,
            is_skill_requested: false,
            workdir: workdirs.open(None, None).ok(),
            config_dir: root,
            max_file_bytes: 1 << 20,
            memory: "## 2026-01-01T00:00:00Z\n**Task:** t\n**Result:** r\n\n",
        };
        assert_eq!(
            system_prompt(&all_parts).expect("a prompt").text,
            "You review.\n\n---\n\n## Skill\n\nBe kind.\n\n---\n\n## Context Files\n\n\
             ### Makefile\n```\nall:\n```\n\n### a.rs\n```rs\nfn main() {}\n```\n\n\
             ### b.md\n````md\n# B\n```sh\nls\n```\n````\n\n---\n\n\
             ## Memory\n\n## 2026-01-01T00:00:00Z\n**Task:** t\n**Result:** r\n\n"
        );
        let bare = PromptParts {
            system_prompt: "",
            skill: None,
            files: &[],
            memory: " ",
            ..all_parts.clone()
        };
        assert_eq!(system_prompt(&bare), Ok(SystemPrompt::default()));
        let lost = PromptParts {
            skill: Some("lost"),
            ..all_parts.clone()
        };
        assert_eq!(
            system_prompt(&lost).expect_err("no skill").to_string(),
            format!(
                "failed to load skill for agent \"x\": skill not found: {}",
                root.join("skills/lost/SKILL.md").display()
            )
        );
        let large = PromptParts {
            max_file_bytes: 20,
            ..all_parts.clone()
        };
        let why = system_prompt(&large).expect_err("too large").to_string();
        assert!(
            why.starts_with("failed to resolve files for agent \"x\": the context files hold"),
            "{why}"
        );
    }

    #[test]
    fn instructions_of_a_client_are_no_part_of_the_memory() {
        let client = ClientAdditions {
            instructions: Some("Be brief.".to_owned()),
            ..ClientAdditions::default()
        };
        let pair = |rest: &str, memory: &str| Some((rest.to_owned(), memory.to_owned()));
        let own = "Be kind.\n\n---\n\n## Memory\n\nAda\n\n";
        assert_eq!(split_memory(own, None), pair("Be kind.", "Ada\n\n"));
        assert_eq!(
            split_memory(own, Some(&client)),
            pair("Be kind.", "Ada\n\n")
        );
        let with_client = append_instructions(own.to_owned(), Some(&client));
        let rest = "Be kind.\n\n## Instructions\n\nBe brief.";
        assert_eq!(split_memory(&with_client, Some(&client)), pair(rest, "Ada"));
        let only_memory = append_instructions("## Memory\n\nAda".to_owned(), Some(&client));
        let rest = "## Instructions\n\nBe brief.";
        assert_eq!(split_memory(&only_memory, Some(&client)), pair(rest, "Ada"));
        assert_eq!(split_memory("Be kind.", Some(&client)), None);
    }

    #[test]
    fn skills_are_looked_up_by_their_form() {
        let config = Path::new("/etc/axed");
        let path = |skill| skill_path(skill, config).display().to_string();
        assert_eq!(path("review"), "/etc/axed/skills/review/SKILL.md");
        assert_eq!(path("mine/s.md"), "/etc/axed/mine/s.md");
        assert_eq!(path("/opt/s.md"), "/opt/s.md");
        assert!(!path("~/s.md").contains('~'));
    }

    #[test]
    fn a_workdir_is_a_directory_and_absolute() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(workdir("x", Some(dir.path())), Ok(dir.path().to_owned()));
        assert!(workdir("x", None).expect("a directory").is_absolute());
        let why = workdir("x", Some(Path::new("/nowhere"))).expect_err("none");
        assert_eq!(
            why.to_string(),
            "invalid workdir for agent \"x\": /nowhere does not exist"
        );
        let why = workdir("x", Some(Path::new("/dev/null"))).expect_err("none");
        assert_eq!(
            why.to_string(),
            "invalid workdir for agent \"x\": /dev/null is not a directory"
        );
    }

    #[test]
    fn messages_carry_their_context() {
        let default = "Execute the task described in your instructions.";
        let message = |input: Option<&str>, context| {
            let input = input.map(Content::from);
            root_message(input, context).to_plain_text().into_owned()
        };
        assert_eq!(message(None, None), default);
        assert_eq!(message(Some(" \n"), Some(" ")), default);
        assert_eq!(message(Some("Go."), Some("c")), "Go.\n\nContext:\nc");
        assert_eq!(child_message("t", Some("c")), "Task: t\n\nContext:\nc");
        assert_eq!(child_message("t", Some(" ")), "Task: t");
    }
}
