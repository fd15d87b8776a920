//! The skills of an agent: what the prompt says of them. Blocking I/O with limits.

use std::io::ErrorKind;
use std::path::Path;

use crate::config::environment;
use crate::domain::skill::{self, READ_SKILL, SKILL_FILE, Skill};
use crate::workdirs::registry::Workdirs;
use crate::workdirs::skill_dir::SkillDir;

/// What an agent's prompt and its checks need of a skill.
pub struct SkillSummary {
    name: String,
    description: String,
    compatibility: Option<String>,
    /// What differs from the format, each with the file and the line.
    pub deviations: Vec<String>,
}

/// Reads the `SKILL.md` of an entry of an agent's file.
///
/// # Errors
/// A sentence that names the file, and the line if there is one.
pub fn read(entry: &str, config_dir: &Path, workdirs: &Workdirs) -> Result<SkillSummary, String> {
    let name = skill::name_of(entry)?;
    let dir_path = environment::skill_dir(entry, config_dir);
    let file = dir_path.join(SKILL_FILE).display().to_string();
    let opened = SkillDir::open(&dir_path, workdirs).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => format!("skill not found: {file}"),
        _ => format!("skill {}: {error}", dir_path.display()),
    })?;
    let text = opened.read(Path::new(SKILL_FILE));
    let text = text.map_err(|why| format!("skill {file} {why}"))?;
    let skill = Skill::parse(name, &text).map_err(|why| format!("skill {file}:{why}"))?;
    let deviations = skill.deviations.iter();
    Ok(SkillSummary {
        name: name.to_owned(),
        deviations: deviations.map(|it| format!("{file}:{it}")).collect(),
        description: skill.description,
        compatibility: skill.compatibility,
    })
}

/// What a prompt says of an agent's skills.
pub fn list(skills: &[SkillSummary]) -> String {
    let mut text = format!(
        "A skill has instructions for one kind of task. If a task fits the description of a skill, read the skill with \
         {READ_SKILL} before you begin, and follow it.\n"
    );
    for skill in skills {
        text.push_str(&format!("\n- **{}**: {}", skill.name, skill.description));
        if let Some(compatibility) = &skill.compatibility {
            text.push_str(&format!(" ({compatibility})"));
        }
    }
    text
}
