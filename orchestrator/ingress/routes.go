// Package ingress is what the data plane asks the control plane, and how: the routes into sandboxes, by a unix socket. The
// proxy itself is package ingress/proxy, in a process of its own that goes on while there is no control plane. It knows nothing of
// what a sandbox is made of.
package ingress

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
)

// States of a route that a request can use. In any other the sandbox can't be reached.
const (
	StateRunning      = "running"
	StateSnapshotting = "snapshotting"
	// StatePausing takes nothing that begins, but leaves what is open: a pause that fails cuts nothing.
	StatePausing = "pausing"
	// StateRewinding leaves what is open, too, until there is another epoch; what begins has to wait for that.
	StateRewinding = "rewinding"
)

// EnvdPort is where envd listens in every sandbox. It asks for tokens of its own.
const EnvdPort = 49983

// TunnelProtocol is what a client upgrades to for a port's bytes as they are, whatever is spoken there.
const TunnelProtocol = "cube-tcp"

// Route is the way into a sandbox.
type Route struct {
	SandboxID string `json:"sandboxID"`
	// Seq orders what is told of one sandbox by one control plane: a greater one is of a later time.
	Seq uint64 `json:"seq"`
	// State is one of the lifecycle's.
	State string `json:"state"`
	// Addr is the sandbox's address as seen from this host; the zero Addr where it has none, as when it is paused.
	Addr netip.Addr `json:"addr"`
	// Epoch names one life of the machine behind the address: it changes with each restore and rollback. No connection
	// outlives it.
	Epoch string `json:"epoch"`
	// Secure sandboxes want EnvdToken of who talks to envd. The data plane checks it before it wakes one, and for a tunnel.
	Secure    bool   `json:"secure,omitempty"`
	EnvdToken string `json:"envdToken,omitempty"`
	// AllowPublic is false where all ports but envd's want a token, whose SHA-256 is TrafficToken.
	AllowPublic  bool   `json:"allowPublic"`
	TrafficToken []byte `json:"trafficToken,omitempty"`
	// MaskHost is the Host that the sandbox's programs get instead of the client's, with ${PORT} for the port; "" = the client's.
	MaskHost string `json:"maskHost,omitempty"`
	// HTTPSPorts are those whose servers speak TLS.
	HTTPSPorts []uint16 `json:"httpsPorts,omitempty"`
	// AutoResume has a request for the paused sandbox wake it.
	AutoResume bool `json:"autoResume,omitempty"`
}

// Open says whether requests may begin.
func (r *Route) Open() bool {
	return r.Addr.IsValid() && (r.State == StateRunning || r.State == StateSnapshotting)
}

// Carries says whether what has begun in an epoch may go on.
func (r *Route) Carries(epoch string) bool {
	return r.Epoch == epoch && (r.Open() || r.State == StatePausing || r.State == StateRewinding)
}

// HTTPS says whether the server at a port speaks TLS.
func (r *Route) HTTPS(port uint16) bool { return slices.Contains(r.HTTPSPorts, port) }

// LogValue leaves the tokens out.
func (r Route) LogValue() slog.Value {
	return slog.GroupValue(slog.String("sandbox", r.SandboxID), slog.String("state", r.State), slog.String("addr", r.Addr.String()), slog.String("epoch", r.Epoch))
}

// Update is news of routes.
type Update struct {
	// Full says that Routes are all that there are: others are gone.
	Full   bool     `json:"full,omitempty"`
	Routes []Route  `json:"routes,omitempty"`
	Gone   []string `json:"gone,omitempty"`
}

// Routes is the control plane as the data plane sees it. Errors are of the classes of errdefs: NotFound for a sandbox that isn't
// there, Unavailable where there is no control plane.
type Routes interface {
	// Lookup tells the route as it is at some time between call and return.
	Lookup(ctx context.Context, id string) (Route, error)
	// Wake resumes a paused sandbox that has AutoResume, waits through transitions, of any sandbox through StateRewinding, and
	// returns when the sandbox is open. Who asks for it has been checked. Errors beside Lookup's: PermissionDenied where it must not be resumed by a request,
	// FailedPrecondition or Conflict where a transition is in the way, ResourceExhausted where there is no room.
	Wake(ctx context.Context, id string) (Route, error)
	// Watch calls each with the full state, and then with each change, in the order in which they happen, until ctx ends or
	// each fails. No change that Lookup or Wake has told of is left out. each returns soon.
	Watch(ctx context.Context, each func(Update) error) error
}
