//! What a storage engine offers to the parts of the store that are written once for both: reads, and changes by its writer.

use futures_util::future::BoxFuture;
use uuid::Uuid;

use crate::store::changes::Changes;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::StoreResult;
use crate::store::write_queue::queue::WriteQueue;

pub trait Engine: Send + Sync + 'static {
    /// Calls `read` with a connection. It may be called again if SQLite could not read the file.
    fn read<T: Send + 'static>(
        &self,
        mode: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, StoreResult<T>> + Clone + Send + 'static,
    ) -> BoxFuture<'_, StoreResult<T>>;

    /// As [`Self::read`], of lists that leave out the runs that stay unreadable: see [`Reader::leaves_out`].
    fn read_list<T: Send + 'static>(
        &self,
        mode: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, StoreResult<T>> + Clone + Send + 'static,
    ) -> BoxFuture<'_, StoreResult<T>> {
        self.read(mode, read)
    }

    fn queue(&self) -> &WriteQueue;

    /// What the database knows this process as; of no meaning if only one process uses it.
    fn writer_id(&self) -> Uuid;

    /// Commits changes, and returns how many rows each statement changed.
    fn commit(&self, changes: Changes) -> BoxFuture<'_, StoreResult<Vec<u64>>> {
        self.queue().change(changes)
    }

    /// As [`Self::commit`], if nobody asks what was changed.
    fn apply(&self, changes: Changes) -> BoxFuture<'_, StoreResult<()>> {
        Box::pin(async move { self.commit(changes).await.map(drop) })
    }

    /// Whether a statement, counted from 0, changed a row.
    fn changes_row(&self, changes: Changes, statement: usize) -> BoxFuture<'_, StoreResult<bool>> {
        Box::pin(async move {
            let changed = self.commit(changes).await?;
            Ok(changed.get(statement).is_some_and(|rows| *rows > 0))
        })
    }
}
