// Package metrics measures the machine that the sandbox is.
package metrics

import (
	"bufio"
	"bytes"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/status"
)

// metrics are what E2B's control planes ask for. Sizes are in bytes, unless their name says otherwise.
type metrics struct {
	Time        int64   `json:"ts"` // seconds since 1970
	CPUs        int     `json:"cpu_count"`
	CPUUsed     float64 `json:"cpu_used_pct"` // of all processors, since the time before
	MemTotalMiB uint64  `json:"mem_total_mib"`
	MemUsedMiB  uint64  `json:"mem_used_mib"`
	MemTotal    uint64  `json:"mem_total"`
	MemUsed     uint64  `json:"mem_used"`
	MemCache    uint64  `json:"mem_cache"`
	DiskUsed    uint64  `json:"disk_used"`
	DiskTotal   uint64  `json:"disk_total"`
}

// shortest is the time over which the use of processors is measured at least.
const shortest = time.Second

// Handler serves the metrics.
type Handler struct {
	mu   sync.Mutex
	last sample
	used float64
}

// sample is the processors' time up to a moment, in ticks.
type sample struct {
	at          time.Time
	busy, total uint64
}

// New makes a handler whose first answer is of the time since.
func New() *Handler {
	return &Handler{last: processors()}
}

func (h *Handler) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	m := metrics{Time: time.Now().Unix(), CPUs: runtime.NumCPU(), CPUUsed: h.cpuUsed()}
	mem := memory()
	m.MemTotal, m.MemCache = mem["MemTotal"], mem["Cached"]+mem["Buffers"]
	if available := mem["MemAvailable"]; available <= m.MemTotal {
		m.MemUsed = m.MemTotal - available
	}
	m.MemTotalMiB, m.MemUsedMiB = m.MemTotal>>20, m.MemUsed>>20
	var st unix.Statfs_t
	if err := unix.Statfs("/", &st); err == nil {
		m.DiskTotal = st.Blocks * uint64(st.Frsize)
		m.DiskUsed = (st.Blocks - st.Bfree) * uint64(st.Frsize)
	}
	status.WriteJSON(w, http.StatusOK, m)
}

func (h *Handler) cpuUsed() float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := processors()
	if n.at.Sub(h.last.at) >= shortest && n.total > h.last.total && n.busy >= h.last.busy {
		h.used = 100 * float64(n.busy-h.last.busy) / float64(n.total-h.last.total)
		h.last = n
	}
	return h.used
}

// processors reads the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
func processors() sample {
	s := sample{at: time.Now()}
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return s
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	for i, f := range strings.Fields(string(line)) {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil || i > 8 { // the name; guests' times, which are in user's
			continue
		}
		s.total += n
		if i != 4 && i != 5 {
			s.busy += n
		}
	}
	return s
}

// memory reads /proc/meminfo, in bytes.
func memory() map[string]uint64 {
	all := map[string]uint64{}
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return all
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		name, value, _ := strings.Cut(s.Text(), ":")
		if f := strings.Fields(value); len(f) > 0 {
			if n, err := strconv.ParseUint(f[0], 10, 53); err == nil {
				all[name] = n << 10
			}
		}
	}
	return all
}
