package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
)

// Pod is a pod as its shim knows it: the id of a container or sandbox in a namespace of containerd's.
type Pod struct {
	Namespace string `json:"namespace"`
	ID        string `json:"id"`
}

func (p Pod) String() string { return p.Namespace + "/" + p.ID }

// cniID is how CNI plugins are told of the pod.
func (p Pod) cniID() string { return p.Namespace + "-" + p.ID }

// key is what the pod's attachment is found by.
func (p Pod) key() (string, error) { return keyOf(p.cniID()) }

// criNamespace is containerd's for the pods of its CRI plugin, which gives CNI plugins their ids as they are. All others put
// the namespace before it, as containerd's go-cni does for ctr and nerdctl.
const criNamespace = "k8s.io"

// maxKey leaves room in what a file system takes for a name (255).
const maxKey = 200

var keyPattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// keyOf makes one of the names by which CNI plugins are told of the same pod.
func keyOf(id string) (string, error) {
	key := strings.TrimPrefix(id, criNamespace+"-")
	if len(key) > maxKey || !keyPattern.MatchString(key) {
		return "", fmt.Errorf("container id %q: it takes at most %d letters, digits, -, _ and ., and a letter or digit first: %w", id, maxKey, errdefs.ErrInvalidArgument)
	}
	return key, nil
}

// record is an attachment as it is written down.
type record struct {
	Pod *Pod `json:"pod,omitempty"` // whose shim has claimed it
	Tap int  `json:"tap"`           // its number
	// Used: a machine may have had the tap.
	Used bool `json:"used,omitempty"`
	// Held: nothing passes, though it is open.
	Held bool    `json:"held,omitempty"`
	Open *opened `json:"open,omitempty"` // nil: closed

	written time.Time // the last time
}

// opened is what Open was told, and the address that it gave.
type opened struct {
	Network string         `json:"network"`
	IfName  string         `json:"ifname"`
	NetNS   string         `json:"netns,omitempty"`
	Address netip.Addr     `json:"address"`
	Policy  *policy.Policy `json:"policy,omitempty"`
	TX      bpf.Rate       `json:"tx,omitzero"`
	RX      bpf.Rate       `json:"rx,omitzero"`
	Ports   []Port         `json:"ports,omitempty"`
}

const (
	tapsDir        = "taps"
	freeDir        = "free"
	addressesDir   = "addresses"
	portsDir       = "ports"
	attachmentsDir = "attachments"
	stateFile      = "state.json"
)

// stateDirs are all of them, in an order in which they can go.
var stateDirs = []string{portsDir, attachmentsDir, addressesDir, freeDir, tapsDir}

// attachment is one that is locked.
type attachment struct {
	record
	key    string
	exists bool // written down
	unlock func()
}

// take locks an attachment, which need not exist: then it is empty. Without make, fs.ErrNotExist.
func (n *Network) take(ctx context.Context, key string, make bool) (*attachment, error) {
	dir := n.path(attachmentsDir, key)
	for {
		if make {
			if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
				return nil, fmt.Errorf("make the attachment's directory: %w", err)
			}
		}
		unlock, err := n.lock(ctx, dir, false)
		if make && errors.Is(err, fs.ErrNotExist) {
			continue // it has just been removed
		} else if err != nil {
			return nil, err
		}
		a := &attachment{key: key, unlock: unlock}
		if a.exists, err = n.read(key, &a.record); err != nil {
			unlock()
			return nil, err
		}
		return a, nil
	}
}

// read tells whether there is a record.
func (n *Network) read(key string, to *record) (bool, error) {
	file := n.path(attachmentsDir, key, stateFile)
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("read attachment %s: %w", key, err)
	}
	if err := json.Unmarshal(b, to); err != nil || !validNumber(to.Tap) {
		return false, fmt.Errorf("the record %s is damaged (tap %d): %w; remove it, and have the rest put in order: cube up", file, to.Tap, errors.Join(err, errdefs.ErrDataLoss))
	}
	if info, err := os.Stat(file); err == nil {
		to.written = info.ModTime()
	}
	return true, nil
}

// write replaces the record as a whole.
func (n *Network) write(a *attachment) error {
	b, err := json.Marshal(a.record)
	if err != nil {
		return fmt.Errorf("encode attachment %s: %w", a.key, err)
	}
	file := n.path(attachmentsDir, a.key, stateFile)
	if err := os.WriteFile(file+".tmp", b, 0o600); err != nil {
		return fmt.Errorf("write attachment %s: %w", a.key, err)
	}
	if err := os.Rename(file+".tmp", file); err != nil {
		return fmt.Errorf("write attachment %s: %w", a.key, err)
	}
	a.exists, a.written = true, time.Now()
	return nil
}

// done unlocks an attachment, and removes what is nobody's.
func (n *Network) done(a *attachment, err *error) {
	if !a.exists {
		if e := os.RemoveAll(n.path(attachmentsDir, a.key)); e != nil {
			*err = errors.Join(*err, fmt.Errorf("remove attachment %s: %w", a.key, e))
		}
	}
	a.unlock()
}

// forget removes the record.
func (n *Network) forget(a *attachment) error {
	if err := os.Remove(n.path(attachmentsDir, a.key, stateFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove attachment %s: %w", a.key, err)
	}
	a.exists = false
	return nil
}

// keys lists the attachments.
func (n *Network) keys() ([]string, error) { return n.names(attachmentsDir) }

// names lists a directory of the state's, which may be missing.
func (n *Network) names(dir string) ([]string, error) {
	entries, err := os.ReadDir(n.path(dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// mark makes an empty file; fs.ErrExist if it is there.
func (n *Network) mark(dir, name string) error {
	f, err := os.OpenFile(n.path(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// unmark removes it; that it isn't there is fine.
func (n *Network) unmark(dir, name string) error {
	if err := os.Remove(n.path(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
