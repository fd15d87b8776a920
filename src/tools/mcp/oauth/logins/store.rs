//! The files with logins. The first line names the server and its authorization server, so that a file can be recognized
//! without the key; the second line is encrypted, and bound to the first. Blocking I/O.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

use crate::config::Logins;
use crate::config::environment::Environment;
use crate::config::secrets::{read_secret, source_variable};
use crate::tools::mcp::oauth::logins::cipher::LoginCipher;
use crate::tools::mcp::oauth::logins::lock::LoginLock;
use crate::tools::mcp::oauth::logins::{Login, LoginError, LoginId};

/// A file of a login has at most two tokens of 64 KiB.
const MAX_FILE: u64 = 1 << 20;
const EXTENSION: &str = "login";
const FORMAT: u32 = 1;

/// The logins of a data directory.
#[derive(Clone, Debug)]
pub struct LoginStore {
    dir: PathBuf,
    key_env: String,
    environment: Environment,
}

/// The first line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    format: u32,
    server: String,
    url: String,
    issuer: Option<String>,
    digest: String,
    /// Names the key.
    key: String,
}

/// Identifies a version of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileVersion(u64, i64, i64, u64);

impl LoginStore {
    pub fn new(settings: &Logins, environment: Environment) -> Self {
        Self {
            dir: settings.dir.clone(),
            key_env: settings.key_env.clone(),
            environment,
        }
    }

    /// The file of a login, whether it exists or not.
    pub fn path(&self, id: &LoginId) -> PathBuf {
        self.dir.join(format!("{}.{EXTENSION}", id.file_stem()))
    }

    /// The file's version; `None` if there is none.
    pub fn version(&self, id: &LoginId) -> Option<FileVersion> {
        let meta = fs::metadata(self.path(id)).ok()?;
        let version = (meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len());
        Some(FileVersion(version.0, version.1, version.2, version.3))
    }

    /// The login; `None` if there is none.
    pub fn read(&self, id: &LoginId) -> Result<Option<Login>, LoginError> {
        let path = self.path(id);
        let Some(text) = read_file(&path)? else {
            return Ok(None);
        };
        let damaged = || LoginError::Damaged { file: path.clone() };
        let (line, sealed) = text.split_once('\n').ok_or_else(damaged)?;
        let header: Header = serde_json::from_str(line).map_err(|_| damaged())?;
        let cipher = self.cipher()?;
        if header.key != cipher.key_id {
            return Err(LoginError::OtherKey {
                file: path,
                variable: source_variable(&self.environment, &self.key_env),
            });
        }
        let sealed = BASE64_STANDARD.decode(sealed.trim_end());
        let opened = cipher.open(line.as_bytes(), &sealed.map_err(|_| damaged())?);
        let login: Login =
            serde_json::from_slice(&opened.ok_or_else(damaged)?).map_err(|_| damaged())?;
        // A file that was renamed to that of another login.
        match header == self.header(id, &login, &cipher) {
            true => Ok(Some(login)),
            false => Err(damaged()),
        }
    }

    /// Replaces the file as a whole: whatever happens, the former login or this one is there. The caller holds the lock.
    pub fn write(&self, id: &LoginId, login: &Login) -> Result<FileVersion, LoginError> {
        let path = self.path(id);
        let failed = |reason: String| LoginError::Io {
            file: path.clone(),
            action: "written",
            reason,
        };
        let cipher = self.prepare()?;
        let header = self.header(id, login, &cipher);
        let header = serde_json::to_string(&header).map_err(|why| failed(why.to_string()))?;
        let text = serde_json::to_vec(login).map_err(|why| failed(why.to_string()))?;
        let sealed = cipher.seal(header.as_bytes(), text);
        let sealed = sealed.ok_or_else(|| failed("there are no random numbers".to_owned()))?;
        let text = format!("{header}\n{}\n", BASE64_STANDARD.encode(sealed));
        let replace = || {
            let new = path.with_extension("new");
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        replace().map_err(|error: std::io::Error| failed(error.to_string()))?;
        let version = self.version(id);
        version.ok_or_else(|| failed("it was removed at once".to_owned()))
    }

    /// Deletes the file, which may not exist.
    pub fn remove(&self, id: &LoginId) -> Result<(), LoginError> {
        let path = self.path(id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(LoginError::Io {
                file: path,
                action: "deleted",
                reason: error.to_string(),
            }),
            _ => Ok(()),
        }
    }

    /// Creates the directory, with access for its owner only, and returns the cipher.
    pub fn prepare(&self) -> Result<LoginCipher, LoginError> {
        let cipher = self.cipher()?;
        let created = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir);
        created.map_err(|error| LoginError::Io {
            file: self.dir.clone(),
            action: "written",
            reason: error.to_string(),
        })?;
        Ok(cipher)
    }

    /// Waits until no other process changes the login. The directory exists if the login does.
    pub async fn lock(&self, id: &LoginId) -> Result<LoginLock, LoginError> {
        LoginLock::acquire(self.path(id).with_extension("lock")).await
    }

    /// The logins that are stored, without these. Files that are damaged beyond recognition are omitted.
    pub fn unused<'i>(&self, needed: impl Iterator<Item = &'i LoginId>) -> Vec<LoginId> {
        let needed: Vec<PathBuf> = needed.map(|id| self.path(id)).collect();
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        let ids = paths.filter_map(|path| {
            if path.extension()? != EXTENSION {
                return None;
            }
            let text = read_file(&path).ok()??;
            let header: Header = serde_json::from_str(text.lines().next()?).ok()?;
            let id = LoginId {
                server: header.server,
                url: header.url,
                digest: header.digest,
            };
            (self.path(&id) == path && !needed.contains(&path)).then_some(id)
        });
        let mut ids: Vec<LoginId> = ids.collect();
        ids.sort();
        ids
    }

    fn header(&self, id: &LoginId, login: &Login, cipher: &LoginCipher) -> Header {
        Header {
            format: FORMAT,
            server: id.server.clone(),
            url: id.url.clone(),
            issuer: login.issuer.clone(),
            digest: id.digest.clone(),
            key: cipher.key_id.clone(),
        }
    }

    fn cipher(&self) -> Result<LoginCipher, LoginError> {
        let variable = || source_variable(&self.environment, &self.key_env);
        let key = read_secret(&self.environment, &self.key_env)?;
        let key = key.ok_or_else(|| LoginError::NoKey {
            variable: variable(),
        })?;
        LoginCipher::new(&key).ok_or_else(|| LoginError::InvalidKey {
            variable: variable(),
        })
    }
}

/// A file's text; `None` if it does not exist.
fn read_file(path: &Path) -> Result<Option<String>, LoginError> {
    let failed = |reason: String| LoginError::Io {
        file: path.to_owned(),
        action: "read",
        reason,
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error.to_string())),
    };
    let mut text = String::new();
    match file.take(MAX_FILE).read_to_string(&mut text) {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::InvalidData => Err(LoginError::Damaged {
            file: path.to_owned(),
        }),
        Err(error) => Err(failed(error.to_string())),
    }
}
