package plugin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestParallel: 200 containers come and go in 8 goroutines, with and without shims, and leave nothing.
func TestParallel(t *testing.T) {
	n := newNode(t)
	n.Up()
	_, err := n.Refill(t.Context())
	testnet.Must(t, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var took []time.Duration
	for g := range 8 {
		wg.Go(func() {
			err := n.Enter()
			for i := g; i < 200 && err == nil; i += 8 {
				var d time.Duration
				d, err = n.oneLife(t.Context(), fmt.Sprint("c", i), i%2 == 0)
				mu.Lock()
				took = append(took, d)
				mu.Unlock()
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	slices.Sort(took)
	t.Logf("add by 8 at a time: median %v, longest %v", took[len(took)/2], took[len(took)-1])
	n.empty()
}

func (n *node) oneLife(ctx context.Context, id string, shim bool) (added time.Duration, err error) {
	pod := network.Pod{Namespace: "default", ID: id}
	if shim {
		if _, err := n.Claim(ctx, pod); err != nil {
			return 0, err
		}
		tap, err := n.OpenTap(ctx, pod)
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, tap.Close(), n.Release(ctx, pod)) }()
	}
	began := time.Now()
	if _, err := n.cni.AddNetworkList(ctx, n.list, n.rt("default-"+id)); err != nil {
		return 0, err
	}
	added = time.Since(began)
	if err := n.cni.CheckNetworkList(ctx, n.list, n.rt("default-"+id)); err != nil {
		return 0, err
	}
	return added, n.cni.DelNetworkList(ctx, n.list, n.rt("default-"+id))
}

// TestKilled: the plugin is killed anywhere, GC leaves nothing, and what comes after works.
func TestKilled(t *testing.T) {
	n := newNode(t)
	n.Up()
	stdin := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "cube", "type": "cube-cni", "cubeConfig": %q, %s}`, n.config, allowAll)
	// As long as the whole takes.
	most := map[string]time.Duration{}
	began := time.Now()
	_, err := n.cni.AddNetworkList(t.Context(), n.list, n.rt("first"))
	testnet.Must(t, err)
	most["ADD"] = time.Since(began)
	began = time.Now()
	testnet.Must(t, n.cni.DelNetworkList(t.Context(), n.list, n.rt("first")))
	most["DEL"] = time.Since(began)
	killed := 0
	for i := range 60 {
		id := fmt.Sprint("c", i)
		command := "ADD"
		if i%3 == 2 {
			command = "DEL"
			_, err := n.cni.AddNetworkList(t.Context(), n.list, n.rt(id))
			testnet.Must(t, err)
		}
		cmd := exec.Command(filepath.Join(n.bin, "cube-cni"))
		cmd.Stdin = strings.NewReader(stdin)
		cmd.Env = append(os.Environ(), "CNI_COMMAND="+command, "CNI_CONTAINERID="+id, "CNI_NETNS="+n.pod, "CNI_IFNAME=eth0", "CNI_PATH="+n.bin)
		testnet.Must(t, cmd.Start())
		// Where it is by then is chance, and meant to be.
		time.Sleep(time.Duration(rand.Int64N(int64(most[command]))))
		_ = cmd.Process.Kill()
		if err := cmd.Wait(); err != nil {
			killed++
		}
		if i%10 != 9 {
			continue
		}
		testnet.Must(t, n.cni.GCNetworkList(t.Context(), n.list, &libcni.GCArgs{}))
		n.empty()
		if _, err := n.oneLife(t.Context(), "after", false); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d of 60 were killed before their end", killed)
	if killed == 0 {
		t.Error("none was killed")
	}
}
