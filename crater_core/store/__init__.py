"""Where the cluster's state lives: one protocol, in memory, SQLite, PostgreSQL or etcd."""

from crater_core.store.memory import MemoryStore as MemoryStore
from crater_core.store.protocol import Commit as Commit
from crater_core.store.protocol import Committed as Committed
from crater_core.store.protocol import Leader as Leader
from crater_core.store.protocol import Loaded as Loaded
from crater_core.store.protocol import PortableStore as PortableStore
from crater_core.store.protocol import SharedStore as SharedStore
from crater_core.store.protocol import Store as Store
from crater_core.store.protocol import StoredEvent as StoredEvent
from crater_core.store.protocol import StoredTask as StoredTask
from crater_core.store.protocol import SubmitKey as SubmitKey
from crater_core.store.protocol import TaskFilter as TaskFilter
from crater_core.store.sqlite import SqliteStore as SqliteStore
