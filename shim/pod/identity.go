package pod

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/guest"
)

// hostMachineID is the host's machine-id(5).
const hostMachineID = "/etc/machine-id"

// machineID is a container's machine-id(5): the same as long as it is that container, whether it is started anew, resumed or
// rolled back, and another for any other, here or on another host. The host's own, which is nobody's business, is the key to it
// and can't be told from it.
func (n *creation) machineID() string {
	key, _ := os.ReadFile(hostMachineID) // a host may have none
	h := hmac.New(sha256.New, key)
	fmt.Fprintf(h, "cube container %s/%s", n.env.Namespace, n.ID)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// name gives a container that was saved as another, and doesn't run yet, its own names.
func (n *creation) name(ctx context.Context) error {
	if n.from.pod.Namespace == n.env.Namespace && n.saved.ID == n.ID {
		return nil // what it is called by now is its own business
	}
	r := &api.IdentifyContainerRequest{Id: n.saved.Guest, Hostname: n.plan.Guest.Hostname, MachineId: n.machineID()}
	if r.Hostname == "" {
		r.Hostname = hostname(n.making.hostname)
	}
	_, err := n.vm.guest.IdentifyContainer(ctx, r)
	if guest.IsUnknownCall(err) {
		n.log.Warn("the container keeps the host name and the machine-id of the one that was saved: its agent is too old to change them")
		return nil
	}
	if err != nil {
		return fmt.Errorf("give the container its own names: %w", err)
	}
	return nil
}
