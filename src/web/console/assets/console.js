// The console's scripts. Pages are complete without them; they add live text, forms and keys.

import * as forms from "./forms.js";
import * as keys from "./keys.js";
import * as live from "./live.js";
import * as pages from "./pages.js";
import * as tree from "./tree.js";

forms.start();
keys.start();
live.start();
pages.start();
tree.start();
