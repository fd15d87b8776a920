//! The bytes of pictures and files: kept once for each digest, as long as some run has them. Knows no transaction.

use std::collections::BTreeSet;

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, params};

use crate::domain::attachment::{Attachment, Blobs, Digest};
use crate::domain::run::RunId;
use crate::store::sqlite::reader_pool::store_error;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::{Step, StoreError};

/// The pictures and files in these steps, each once.
pub fn distinct(steps: &[Step]) -> Vec<Attachment> {
    let all = steps.iter().flat_map(Step::attachments);
    let mut digests = BTreeSet::new();
    let new = all.filter(|attachment| digests.insert(attachment.sha256));
    new.cloned().collect()
}

/// Keeps the bytes, if they are new, and that this run has them. Bytes that went with another run while this one was about
/// to refer to them stay away: the run goes on without them.
pub fn insert(
    sql: &mut Statements<'_>,
    run: RunId,
    attachment: &Attachment,
) -> rusqlite::Result<()> {
    let digest = attachment.sha256.0;
    if let Some(data) = &attachment.data
        && !sql.has_attachment.exists([digest])?
    {
        sql.insert_attachment.execute(params![digest, &data[..]])?;
    }
    sql.insert_attachment_use
        .execute(params![rows::id_bytes(&run), digest])
        .map(drop)
}

/// Takes one of the run's digests off it, with the bytes where no other run has them. Returns how many bytes went; `None`
/// if the run has no digest any more.
pub fn delete_one(sql: &mut Statements<'_>, run: RunId) -> rusqlite::Result<Option<i64>> {
    let id = rows::id_bytes(&run);
    let digest: Option<[u8; 32]> = sql
        .find_attachment_use
        .query_row([id], |row| row.get(0))
        .optional()?;
    let Some(digest) = digest else {
        return Ok(None);
    };
    sql.delete_attachment_use.execute(params![id, digest])?;
    let deleted_bytes = sql
        .delete_attachment
        .query_row([digest], |row| row.get(0))
        .optional()?;
    Ok(Some(deleted_bytes.unwrap_or(0)))
}

/// The bytes with these digests, as far as they are there.
pub fn read(db: &Connection, digests: &[Digest]) -> Result<Blobs, StoreError> {
    let mut sql = db
        .prepare_cached("SELECT data FROM attachments WHERE hash = ?1")
        .map_err(store_error)?;
    let mut blobs = Blobs::new();
    for digest in digests {
        let data: Option<Vec<u8>> = sql
            .query_row([digest.0], |row| row.get(0))
            .optional()
            .map_err(store_error)?;
        blobs.extend(data.map(|data| (*digest, Bytes::from(data))));
    }
    Ok(blobs)
}
