package sandbox

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cubesandbox/cube/internal/config"
)

// LogPath is the file that takes the output of a detached container. Earlier output is in LogPath.1, and what was before
// that in LogPath.2, and so on: the shim rotates them.
func LogPath(cfg *config.Config, id string) string {
	return filepath.Join(cfg.LogDir(), "containers", id+".log")
}

// logURI has the shim write there.
func logURI(cfg *config.Config, id string) *url.URL {
	q := url.Values{}
	q.Set("max-size", strconv.FormatInt(int64(cfg.Logs.MaxSize), 10))
	q.Set("max-files", strconv.Itoa(cfg.Logs.MaxFiles))
	return &url.URL{Scheme: "file", Path: LogPath(cfg, id), RawQuery: q.Encode()}
}

// logNumbers lists the numbers of the log's files, ascending: 0 is path itself, the newest.
func logNumbers(path string) ([]int, error) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var numbers []int
	for _, e := range entries {
		rest, ours := strings.CutPrefix(e.Name(), filepath.Base(path))
		if !ours {
			continue
		}
		if rest == "" {
			numbers = append(numbers, 0)
		} else if n, err := strconv.Atoi(strings.TrimPrefix(rest, ".")); err == nil && n > 0 && rest == "."+strconv.Itoa(n) {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

func numberedLog(path string, n int) string {
	if n == 0 {
		return path
	}
	return path + "." + strconv.Itoa(n)
}

// removeLog removes all files of a log.
func removeLog(path string) error {
	numbers, err := logNumbers(path)
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range numbers {
		if err := os.Remove(numberedLog(path, n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// openLogFiles opens the files of a log that are newer than one, or all if that is nil or gone, oldest first. What is made
// meanwhile may not be among them.
func openLogFiles(path string, than os.FileInfo) (files []*os.File, err error) {
	defer func() {
		if err != nil {
			closeAll(files)
			files = nil
		}
	}()
	// A rotation gives each file the next number. Going in the same direction none slips by, but one may be met again; what
	// came after it the first time is met again, too, or was made meanwhile.
	for n := 0; ; n++ {
		f, err := openLogFile(path, &n)
		if err != nil {
			return files, err
		}
		if f == nil || than != nil && sameFile(f, than) {
			closeAll([]*os.File{f})
			slices.Reverse(files)
			return files, nil
		}
		this, err := f.Stat()
		if err != nil {
			f.Close()
			return files, err
		}
		if i := slices.IndexFunc(files, func(f *os.File) bool { return sameFile(f, this) }); i >= 0 {
			closeAll(files[i:])
			files = files[:i]
		}
		files = append(files, f)
	}
}

// openLogFile opens the file with that number, or the next one there is, and gives its number. It is nil after the last.
func openLogFile(path string, n *int) (*os.File, error) {
	for {
		f, err := os.Open(numberedLog(path, *n))
		if !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
		numbers, err := logNumbers(path)
		if err != nil {
			return nil, err
		}
		i, _ := slices.BinarySearch(numbers, *n)
		if i == len(numbers) {
			return nil, nil
		}
		*n = numbers[i]
	}
}

func sameFile(f *os.File, as os.FileInfo) bool {
	fi, err := f.Stat()
	return err == nil && os.SameFile(fi, as)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// seekTail moves to the beginning of the n last lines of all files, oldest first, together. It returns how many files
// are before that.
func seekTail(files []*os.File, n int) (skip int, err error) {
	const block = 64 << 10
	buf := make([]byte, block)
	last := true // nothing has been seen but, maybe, the end of the last line
	for i := len(files) - 1; i >= 0; i-- {
		end, err := files[i].Seek(0, io.SeekEnd)
		if err != nil {
			return 0, err
		}
		if n == 0 {
			return i, nil
		}
		for end > 0 {
			start := max(0, end-block)
			part := buf[:end-start]
			if _, err := files[i].ReadAt(part, start); err != nil {
				return 0, err
			}
			end = start
			if last && part[len(part)-1] == '\n' {
				part = part[:len(part)-1]
			}
			last = false
			for at := bytes.LastIndexByte(part, '\n'); at >= 0; at = bytes.LastIndexByte(part, '\n') {
				if n--; n == 0 {
					_, err := files[i].Seek(start+int64(at)+1, io.SeekStart)
					return i, err
				}
				part = part[:at]
			}
		}
		if _, err := files[i].Seek(0, io.SeekStart); err != nil {
			return 0, err
		}
	}
	return 0, nil
}
