//! Confines this process for good, before it becomes a command: by Landlock what files it reaches, by a filter of system
//! calls what Landlock does not cover. Knows no command.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::tools::run_command::filter;
use crate::workdirs::FileId;
use crate::workdirs::reserved::{Reserved, Snapshot};

/// The first of which no write gets by: earlier ones let files be cut short anywhere. Linux 6.2.
const NEEDED: ABI = ABI::V3;

/// Read and executed. `/usr` stands here by what is in it, but for the folders below it that are not the system's own.
const SYSTEM: &[&str] = &[
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/sys/devices/system/cpu",
];
/// In these everything but [`NOT_SYSTEM`].
const SYSTEM_PARENTS: &[&str] = &["/usr", "/usr/local"];
/// May have the configuration of services, such as ours.
const NOT_SYSTEM: &[&str] = &["etc", "local"];
/// Of `/etc` what programs need and what holds no secret.
const SETTINGS: &[&str] = &[
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "fonts",
    "gai.conf",
    "gitconfig",
    "group",
    "host.conf",
    "hosts",
    "inputrc",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "magic",
    "mime.types",
    "networks",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "perl",
    "pki/ca-trust",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "profile",
    "profile.d",
    "protocols",
    "python3",
    "python3.11",
    "python3.12",
    "python3.13",
    "resolv.conf",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
];
/// Of `/proc` what tells of the machine and of no process.
const MACHINE: &[&str] = &[
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "stat",
    "sys",
    "uptime",
    "version",
];
/// Devices that are read, the first also written.
const DEVICES: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
];

/// Most paths that commands are allowed to read: each command allows each of them anew.
const MOST_PATHS: usize = 4096;

/// Whether this system can confine.
pub fn is_available() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = ruleset.handle_access(AccessFs::from_all(NEEDED));
    ruleset.and_then(Ruleset::create).is_ok()
}

/// Confines this process: it writes in its working directory and in `temporary`, and reads nothing that is reserved.
///
/// # Errors
/// Why it is not confined. Then it must not go on.
pub fn confine(temporary: &Path, network: bool, reserved: Vec<PathBuf>) -> Result<(), String> {
    let nothing = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    close_others().map_err(|error| format!("its files cannot be closed: {error}"))?;
    set_capabilities(None, nothing)
        .map_err(|error| format!("its privileges cannot be dropped: {error}"))?;
    let readable = readable(&Reserved::of(reserved).now())?;
    let status = restrict(temporary, network, readable);
    let status = status.map_err(|error| format!("Landlock cannot confine it: {error}"))?;
    if status == RulesetStatus::NotEnforced {
        return Err("Landlock does not confine it".to_owned());
    }
    filter::apply(network, signals_can_be_scoped())
}

/// Closes what whoever started the daemon left open for it and for all that it starts: Landlock lets what is open be.
fn close_others() -> std::io::Result<()> {
    let mut open: Vec<i32> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        open.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<i32>().ok()),
        );
    }
    for file in open.into_iter().filter(|file| *file > 2) {
        // The one that was read here is closed by now.
        let _ = nix::unistd::close(file);
    }
    Ok(())
}

fn signals_can_be_scoped() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    ruleset
        .scope(Scope::Signal)
        .and_then(Ruleset::create)
        .is_ok()
}

fn restrict(
    temporary: &Path,
    network: bool,
    readable: Vec<PathBuf>,
) -> Result<RulesetStatus, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(NEEDED))?
        // What later kernels add.
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::IoctlDev)?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?;
    if !network {
        ruleset = ruleset.handle_access(AccessNet::from_all(ABI::V4))?;
    }
    let reads = AccessFs::from_read(NEEDED);
    let changes = AccessFs::from_all(NEEDED) & !(AccessFs::MakeChar | AccessFs::MakeBlock);
    let own = [Path::new("."), temporary];
    let null = Path::new("/dev/null");
    let created = ruleset
        .create()?
        .set_compatibility(CompatLevel::HardRequirement)
        // What this machine does not have is passed over.
        .add_rules(path_beneath_rules(readable, reads))?
        .add_rules(path_beneath_rules([null], reads | AccessFs::WriteFile))?
        .add_rules(path_beneath_rules(own, changes))?;
    Ok(created.restrict_self()?.ruleset)
}

/// What every command reads and executes: the system's files without what is reserved.
///
/// # Errors
/// Where that cannot be left out.
pub fn readable(reserved: &Snapshot) -> Result<Vec<PathBuf>, String> {
    let mut paths = Vec::new();
    for path in system() {
        leave_out(path, reserved, &mut paths)?;
    }
    Ok(paths)
}

/// Adds this path; in its place what is in it, where something of that is reserved.
fn leave_out(path: PathBuf, reserved: &Snapshot, paths: &mut Vec<PathBuf>) -> Result<(), String> {
    let Ok(meta) = std::fs::metadata(&path) else {
        return Ok(());
    };
    let Some(own) = reserved.contained(FileId::of_std(&meta)) else {
        paths.push(path);
        return Ok(());
    };
    // What is behind a link is one of the other paths, or no path of the system's.
    let is_entered =
        meta.is_dir() && !path.is_symlink() && !reserved.is_barred(FileId::of_std(&meta));
    if !is_entered {
        return Ok(());
    }
    let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
    for entry in entries {
        if paths.len() > MOST_PATHS {
            return Err(format!(
                "{} is the server's own and lies in {}, which commands read and which has too many entries to leave it \
                 out; move it elsewhere",
                own.display(),
                path.display()
            ));
        }
        leave_out(entry.path(), reserved, paths)?;
    }
    Ok(())
}

fn system() -> Vec<PathBuf> {
    let below = |parent: &str, names: &[&str]| -> Vec<PathBuf> {
        let parent = Path::new(parent);
        names.iter().map(|name| parent.join(name)).collect()
    };
    let mut paths: Vec<PathBuf> = [SYSTEM, DEVICES]
        .concat()
        .iter()
        .map(PathBuf::from)
        .collect();
    paths.extend(below("/etc", SETTINGS));
    paths.extend(below("/proc", MACHINE));
    for parent in SYSTEM_PARENTS {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        let ours =
            entries.filter(|entry| !NOT_SYSTEM.iter().any(|name| entry.file_name() == *name));
        paths.extend(ours.map(|entry| entry.path()));
    }
    paths
}
