//! Stores the bytes of pictures and files, once for each digest, as long as a run refers to them.

use rusqlite::named_params;

use crate::domain::attachment::Attachment;
use crate::domain::run::RunId;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;

/// Stores the bytes if they are new, and that this run refers to them. Nothing is stored if the attachment has no bytes and
/// another run, that had them, was deleted in the meantime: this run continues without them.
pub fn insert(
    sql: &mut Statements<'_>,
    run: RunId,
    attachment: &Attachment,
) -> rusqlite::Result<()> {
    let digest = attachment.sha256.0;
    if let Some(data) = &attachment.data
        && !sql.has_attachment.exists(named_params! {":hash": digest})?
    {
        let bytes = named_params! {":hash": digest, ":data": &data[..]};
        sql.insert_attachment.execute(bytes)?;
    }
    sql.insert_attachment_use
        .execute(named_params! {":run": rows::id_bytes(&run), ":hash": digest})
        .map(drop)
}

/// Removes one of the run's references, and the bytes if no other run refers to them. Returns the number of bytes removed;
/// `None` if the run has no reference.
pub fn delete_one(sql: &mut Statements<'_>, run: RunId) -> rusqlite::Result<Option<i64>> {
    let id = rows::id_bytes(&run);
    let digest: Option<[u8; 32]> = sql
        .find_attachment_use
        .query_row(named_params! {":run": id}, |row| row.get("hash"))?;
    let Some(digest) = digest else {
        return Ok(None);
    };
    sql.delete_attachment_use
        .execute(named_params! {":run": id, ":hash": digest})?;
    let deleted_bytes = sql
        .delete_attachment
        .query_row(named_params! {":hash": digest}, |row| row.get("bytes"))?;
    Ok(Some(deleted_bytes.unwrap_or(0)))
}
