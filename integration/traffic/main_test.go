// Package traffic runs containers whose connections and datagrams never stop, and meanwhile kills, restarts and removes what
// they could depend on: the daemon, machines, the whole network. It shows what goes on, what doesn't get through, and what is
// left. The host's own traffic and its firewall have their part in it, and so has a container runtime's CNI.
package traffic

import (
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }
